// A folder for the files of rows, and these files, which have no name there.

#pragma once

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

  // The descriptors of files that were made here and are open.
  std::vector<int> open_files() const {
    std::vector<int> files;
    for (const auto& link : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      const std::string target = std::filesystem::read_symlink(link.path(), gone);
      if (target.starts_with(path_ + "/")) files.push_back(std::stoi(link.path().filename()));
    }
    return files;
  }
  int open_file() const { return open_files().at(0); }

 private:
  std::string path_;
};
