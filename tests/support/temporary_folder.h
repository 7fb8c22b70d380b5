// A folder for the files of one test.
#pragma once

#include <emend/core/atomic_file.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <system_error>

namespace emend::testing {

/// A folder that is empty at first and goes away with the object.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(const std::string& name)
      : path_(std::filesystem::temp_directory_path() / ("emend-" + name + "-" + std::to_string(::getpid()))) {
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  void write(const std::string& name, const std::string& text) const { write_file(path_ / name, text); }

 private:
  std::filesystem::path path_;
};

}  // namespace emend::testing
