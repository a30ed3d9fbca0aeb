#include "server_record.h"

#include <cstring>

#include "crc32.h"

namespace phalanx {
namespace {

constexpr std::array<const char*, 3> kKinds = {"gradient", "delta", "assign"};

template <class T>
Bytes bytes_of(const T* numbers, std::size_t count) {
  return std::as_bytes(std::span(numbers, count));
}

Bytes bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

std::string layout(const char* dtype, std::size_t rows, const std::string& more = "") {
  return std::string("[\"") + dtype + "\",[" + std::to_string(rows) + more + "]]";
}

void add(std::string& list, const std::string& entry) { list += (list.empty() ? "" : ",") + entry; }

template <class T>
void put(std::byte*& at, T number) {  // little-endian, as every machine that we run on
  std::memcpy(at, &number, sizeof number);
  at += sizeof number;
}

}  // namespace

PushRecord::PushRecord(std::uint64_t client, std::uint64_t seq, std::uint64_t step, double weight,
                       std::span<const Update> updates) {
  parts_.resize(2);
  std::string changes, arrays;
  for (const Update& update : updates) describe(update, changes, arrays);
  text_ = "{\"op\":\"push\",\"client\":" + std::to_string(client) + ",\"seq\":" + std::to_string(seq) +
          ",\"meta\":{\"step\":" + std::to_string(step) + ",\"weight\":" + text_of(weight) + ",\"changes\":[" +
          changes + "]},\"arrays\":[" + arrays + "]}";
  std::uint32_t checksum = 0;
  std::uint64_t size = 0;
  for (std::size_t i = 2; i < parts_.size(); ++i) {
    checksum = crc32(parts_[i], checksum);
    size += parts_[i].size();
  }
  std::memcpy(header_.data(), "PXR1", 4);
  std::byte* at = header_.data() + 8;
  put(at, static_cast<std::uint32_t>(text_.size()));
  put(at, size);
  put(at, crc32(bytes_of(text_)));
  put(at, checksum);
  at = header_.data() + 4;
  put(at, crc32(std::span(header_).subspan(8)));
  parts_[0] = header_;
  parts_[1] = bytes_of(text_);
}

void PushRecord::describe(const Update& update, std::string& changes, std::string& arrays) {
  const TablePush& sent = update.sent;
  const std::size_t n = sent.keys.size(), dim = update.table->table->spec().dim;
  std::string columns;
  add(arrays, layout("int64", n));
  add(arrays, layout("float32", n, "," + std::to_string(dim)));
  parts_.push_back(bytes_of(sent.keys.data(), n));
  parts_.push_back(bytes_of(sent.values.data(), n * dim));
  const auto column = [&](const char* name, const char* dtype, const auto* numbers) {
    if (numbers == nullptr) return;
    columns += std::string(",\"") + name + "\":true";
    add(arrays, layout(dtype, n));
    parts_.push_back(bytes_of(numbers, n));
  };
  column("counts", "uint32", sent.counts);
  column("shows", "float32", sent.shows);
  column("clicks", "float32", sent.clicks);
  add(changes, "{\"table\":" + update.table->json_name + ",\"kind\":\"" +
                   kKinds[static_cast<std::size_t>(sent.kind)] +
                   "\",\"lr\":" + (sent.has_lr ? text_of(sent.lr) : "null") + columns + "}");
}

}  // namespace phalanx
