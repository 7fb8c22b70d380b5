#include <emend/core/atomic_file.h>
#include <emend/core/staged.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

namespace emend {
namespace {

[[noreturn]] void throw_io(const std::filesystem::path& path, const std::string& action, int error) {
  const bool full = error == ENOSPC || error == EDQUOT;
  const bool memory = error == ENOMEM;
  throw Error(class_of_errno(error),
              {path.string(), "cannot " + action + " (" + std::strerror(error) + ")", "",
               full     ? "free some space or choose another folder; nothing was left under the final name"
               : memory ? "free some memory, or raise its limit"
                        : "check the path and its permissions"});
}

void sync_folder(const std::filesystem::path& folder) {
  const Descriptor open(::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  ::fsync(open.fd);  // the rename has happened; some file systems cannot sync folders
}

Descriptor open_for_reading(const std::filesystem::path& path, struct stat& info) {
  // Without O_NONBLOCK the opening of a pipe would wait for somebody to write to it.
  Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.fd < 0 && errno == ENOENT)
    throw Error(ErrorClass::kNotFound, {path.string(), "no such file", "a readable file", "check the path"});
  if (file.fd < 0) throw_io(path, "open", errno);
  if (::fstat(file.fd, &info) != 0) throw_io(path, "examine", errno);
  if (S_ISDIR(info.st_mode))
    throw Error(ErrorClass::kNotFound, {path.string(), "is a folder", "a file", "name a file in it"});
  if (!S_ISREG(info.st_mode))
    throw Error(ErrorClass::kIo,
                {path.string(), "is a pipe or a device", "a regular file", "write its contents to a file first"});
  return file;
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd >= 0) ::close(fd);
}

bool lock_alone(int fd, const std::filesystem::path& path) {
  if (::flock(fd, LOCK_EX | LOCK_NB) == 0) return true;
  if (errno == EWOULDBLOCK) return false;
  if (errno != ENOSYS && errno != EOPNOTSUPP && errno != ENOLCK) throw_io(path, "lock", errno);
  return true;
}

AtomicFile::AtomicFile(std::filesystem::path path) : path_(std::move(path)) {
  static std::atomic<int> counter{0};  // process-wide uniqueness of names, no model state
  require_place(path_);
  temporary_ = path_;
  temporary_ += ".tmp-" + std::to_string(::getpid()) + "-" + std::to_string(counter++);
  std::error_code failed;  // told by opening the file
  if (path_.has_parent_path()) std::filesystem::create_directories(path_.parent_path(), failed);
  file_.fd = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file_.fd < 0) throw_io(path_, "create", errno);
  if (struct stat older{}; ::stat(path_.c_str(), &older) == 0) ::fchmod(file_.fd, older.st_mode & 0777);
}

AtomicFile::~AtomicFile() {
  if (file_.fd >= 0) ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, size_t size) {
  const char* p = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t n = ::write(file_.fd, p, std::min<size_t>(size, size_t{1} << 30));
    if (n < 0) {
      if (errno == EINTR) continue;
      throw_io(path_, "write", errno);
    }
    p += n;
    size -= static_cast<size_t>(n);
    size_ += static_cast<size_t>(n);
  }
}

void AtomicFile::commit() {
  if (::fsync(file_.fd) != 0) throw_io(path_, "sync", errno);
  if (::close(std::exchange(file_.fd, -1)) != 0 || ::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary_.c_str());
    throw_io(path_, "rename into place", error);
  }
  sync_folder(path_.parent_path());
}

void write_file(const std::filesystem::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

std::string read_file(const std::filesystem::path& path) {
  return std::string(MappedFile(path).text());
}

MappedFile::MappedFile(const std::filesystem::path& path) {
  struct stat info {};
  const Descriptor file = open_for_reading(path, info);
  size_ = static_cast<size_t>(info.st_size);
  if (size_ == 0) return;
  void* p = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE, file.fd, 0);
  if (p == MAP_FAILED) throw_io(path, "map", errno);
  data_ = static_cast<std::byte*>(p);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(data_, size_);
}

}  // namespace emend
