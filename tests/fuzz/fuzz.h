// What a fuzz target is: bytes go in, and either the reader takes them or it throws Error. Anything else is a finding:
// another exception, a failed check, a sanitizer's report, a hang.
//
// A target is one file <name>_fuzz.cpp with EMEND_FUZZ_TARGET(<name>), and a folder corpus/<name> with small inputs of
// our own. It is built twice: with libFuzzer (EMEND_BUILD_FUZZERS), each a program, and into one plain program for all
// that replays a corpus with deterministic mutations (the tests with the label "fuzz").
#pragma once

#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace emend::fuzz {

struct Target {
  std::string_view name;
  void (*run)(std::string_view input);
};

/// Those of the program.
inline std::vector<Target>& targets() {
  static std::vector<Target> all;
  return all;
}

inline bool add_target(std::string_view name, void (*run)(std::string_view)) {
  targets().push_back({name, run});
  return true;
}

/// EMEND_FUZZ_TARGET(name) { what is done with `input`, one after the other }
#define EMEND_FUZZ_TARGET(name)                                           \
  static void fuzz_##name(std::string_view input);                        \
  static const bool name##_is_a_target = add_target(#name, &fuzz_##name); \
  static void fuzz_##name(std::string_view input)

/// Runs a reader; Error is the expected end. Its text must say something and be fit to print.
template <class F>
void expect_error_or_success(F&& reader) {
  try {
    reader();
  } catch (const Error& error) {
    const std::string_view text = error.what();
    if (text.empty() || text.size() > 20000 || text.find('\0') != std::string_view::npos) {
      std::fprintf(stderr, "an error text of %zu bytes\n", text.size());
      std::abort();
    }
  }
}

/// Bytes as a file, in memory only.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view bytes) : fd_(::memfd_create("fuzz", MFD_CLOEXEC)) {
    if (fd_ < 0 || ::write(fd_, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) std::abort();
  }
  ~MemoryFile() { ::close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  [[nodiscard]] std::filesystem::path path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  int fd_;
};

/// A folder in memory (or $TEST_TMPDIR) that goes away with the program.
class Folder {
 public:
  explicit Folder(const char* name) {
    const char* base = std::getenv("TEST_TMPDIR");
    path_ = std::filesystem::path(base                                        ? base
                                  : std::filesystem::is_directory("/dev/shm") ? "/dev/shm"
                                                                              : "/var/tmp") /
            ("emend-fuzz-" + std::string(name) + "-" + std::to_string(::getpid()));
    std::filesystem::create_directories(path_);
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  /// Plain writing: atomic files would sync to the disk each time.
  void write(const char* name, std::string_view text) const {
    FILE* file = std::fopen((path_ / name).c_str(), "wb");
    if (!file || std::fwrite(text.data(), 1, text.size(), file) != text.size()) std::abort();
    std::fclose(file);
  }
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace emend::fuzz
