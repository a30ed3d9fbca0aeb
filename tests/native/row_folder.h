// A folder for the files of rows, and these files, which have no name there.

#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "check.h"

// A folder of this process, which the last test leaves empty.
class Folder {
 public:
  Folder() {
    std::string path = std::filesystem::temp_directory_path() / "row-file-XXXXXX";
    CHECK(mkdtemp(path.data()) != nullptr);
    path_ = path;
  }
  Folder(const Folder&) = delete;
  ~Folder() { rmdir(path_.c_str()); }
  const std::string& path() const { return path_; }

  // The descriptors of files that were made here and are open for writing, through the system's cache.
  std::vector<int> open_files() const {
    std::vector<int> files;
    for (const auto& link : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      const std::string target = std::filesystem::read_symlink(link.path(), gone);
      if (!target.starts_with(path_ + "/")) continue;
      const int file = std::stoi(link.path().filename());
      if ((fcntl(file, F_GETFL) & (O_ACCMODE | O_DIRECT)) == O_RDWR) files.push_back(file);
    }
    return files;
  }
  // Lets the system forget what these files hold, so that it is read from the disk.
  void drop_cache() const {
    for (const int file : open_files()) {
      fdatasync(file);
      posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    }
  }
  int open_file() const { return open_files().at(0); }

 private:
  std::string path_;
};
