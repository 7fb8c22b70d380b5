// Files that appear complete or not at all: written to a temporary beside the target, synced, renamed.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

namespace emend {

/// A file descriptor of the system's, closed with its owner; -1 is none.
struct Descriptor {
  int fd = -1;

  explicit Descriptor(int opened = -1) noexcept : fd(opened) {}
  Descriptor(Descriptor&& other) noexcept : fd(std::exchange(other.fd, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd, other.fd);
    return *this;
  }
  ~Descriptor();
};

/// Locks a file for its owner alone, for as long as it is open. False if another process has it. True also where the
/// file system has no locks. Throws Error(kIo) naming `path` if it cannot be locked for another reason.
[[nodiscard]] bool lock_alone(int fd, const std::filesystem::path& path);

/// An output file that takes its final name only on commit(). The destructor removes an uncommitted temporary.
/// A link to a file is replaced, never written through: a folder of somebody else's may have links that lead anywhere.
/// Every write error throws Error(kIo) naming the path and the system's reason (full disk, no permission).
class AtomicFile {
 public:
  /// Opens "<path>.tmp-<pid>-<n>" in the same folder, which is made where it is missing. Throws
  /// Error(kInvalidArgument), with nothing changed, for a device, a pipe and a link to nothing (require_place).
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t size);  ///< throws Error(kIo)
  void write(std::string_view text) { write(text.data(), text.size()); }
  [[nodiscard]] size_t size() const noexcept { return size_; }
  [[nodiscard]] int fd() const noexcept { return file_.fd; }  ///< for what the system alone can do to it

  /// fsync, rename over the target, fsync the folder.
  void commit();

 private:
  std::filesystem::path path_, temporary_;
  Descriptor file_;
  size_t size_ = 0;
};

/// Writes `text` as the whole of `path`, atomically. Throws as AtomicFile does.
void write_file(const std::filesystem::path& path, std::string_view text);
/// Reads a whole file. Throws Error(kNotFound) or Error(kIo).
[[nodiscard]] std::string read_file(const std::filesystem::path& path);

/// A read-only view of a whole file in memory, private to this process; pages are read as they are touched.
class MappedFile {
 public:
  /// Throws Error(kNotFound), Error(kIo); an empty file gives size() == 0.
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  [[nodiscard]] const std::byte* data() const noexcept { return data_; }
  /// Copy-on-write: a write through this pointer never reaches the file.
  [[nodiscard]] std::byte* mutable_data() const noexcept { return data_; }
  [[nodiscard]] size_t size() const noexcept { return size_; }
  [[nodiscard]] std::string_view text() const noexcept { return {reinterpret_cast<const char*>(data_), size_}; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace emend
