#include "cli.h"

#include <emend/core/error.h>
#include <emend/devices/process_environment.h>
#include <emend/models/checkpoint.h>

#include <algorithm>
#include <filesystem>
#include <set>

namespace emend::tools {
namespace {

namespace fs = std::filesystem;
using models::is_within;

bool is_output(const Option& option) {
  const auto names = option.spellings();
  return std::ranges::any_of(names, [](const auto& name) { return name == "--out" || name == "OUT"; });
}

bool is_read(const Option& option) {
  if (is_output(option) || writes_beside(option.names)) return false;
  for (const char* type : {"FILE", "FILE|NAME", "FILE|own", "DIR", "PATH", "MODEL"})
    if (option.type == type) return true;
  return false;
}

std::vector<std::string> values(const Option& option) {
  if (const auto* one = std::get_if<std::string*>(&option.value)) return {**one};
  if (const auto* many = std::get_if<std::vector<std::string>*>(&option.value)) return **many;
  return {};
}

// What can be seen of a place without opening it. Of several processes one says it once it has met the others, so that
// they do not wait for it.
void require_there(const Option& option, const std::string& path) {
  if (path.empty() || devices::read_process_environment().size > 1) return;
  std::error_code failure;
  const auto status = fs::status(path, failure);
  const auto refuse = [&](ErrorClass error_class, const std::string& got, const std::string& expected) {
    throw Error(error_class, {path, got, expected, "check the path"});
  };
  const bool file = option.type == "FILE", known = fs::is_regular_file(status);
  if (file && !fs::exists(status)) refuse(ErrorClass::kNotFound, "no such file", "a readable file");
  if (file && fs::is_directory(status)) refuse(ErrorClass::kNotFound, "is a folder", "a file");
  if ((file || option.type == "PATH") && known && fs::file_size(path, failure) == 0)
    refuse(ErrorClass::kCorruption, "the file is empty", "a file with something in it");
}

// A folder, there or to be made: what it lies in is one.
void require_folder(const Option& option, const std::string& path) {
  if (option.type != "DIR" || path.empty() || devices::read_process_environment().size > 1) return;
  std::error_code failure;
  fs::path place = fs::absolute(path, failure);
  while (place.has_relative_path() && !fs::exists(place, failure)) place = place.parent_path();
  if (fs::exists(place, failure) && !fs::is_directory(place, failure))
    throw Error(ErrorClass::kIo, {place.string(), "is a file", "a folder", option.names + " names another"});
}

void require_apart(const std::string& given, const fs::path& place, const std::string& input) {
  std::error_code failure;
  const auto real = fs::canonical(input, failure);
  if (failure) return;  // a name, or said by require_there
  const auto refuse = [&](const std::string& got) {
    emend::refuse({given, got, "a place that this command does not read", "choose another place"});
  };
  if (real == place) refuse("it is also what is read");
  if (is_within(place, real) && fs::exists(real / "config.json", failure))
    refuse("it lies inside of the model " + input);
  if (is_within(place, real) && fs::is_regular_file(place, failure)) refuse("it is a file of " + input);
}

// The place that the system means by a path.
std::string settled(const Option& option, const std::string& path, bool log) {
  std::error_code failure;
  const auto own = fs::symlink_status(path, failure);
  const auto status = fs::status(path, failure);
  const auto refuse = [&](const std::string& got, const std::string& expected) {
    emend::refuse({path, got, expected, option.spellings().back() + " names another"});
  };
  if (fs::is_symlink(own) && !fs::exists(status)) refuse("a link to a place that is not there", "a new place");
  const bool plain = !fs::exists(status) || fs::is_regular_file(status) || fs::is_directory(status);
  if (!plain && !log) refuse("a device or a pipe", "a file or a folder");
  if (option.type == "FILE" && !log && (fs::is_directory(status) || path.ends_with('/'))) refuse("a folder", "a file");
  if (option.type == "DIR" && fs::is_regular_file(status)) refuse("a file", "a folder");
  const bool turns = path.find("..") != std::string::npos;
  const auto real = fs::is_symlink(own) || turns ? fs::weakly_canonical(path, failure) : fs::path(path);
  return failure ? path : real.string();
}

}  // namespace

bool writes_beside(std::string_view name) {
  return name == "--log-file" || name == "--cache" || name == "--stats-cache";
}

void settle_places(Options& options) {
  std::vector<std::string> inputs;
  for (const Option& option : options.all())
    for (const auto& path : values(option)) {
      if (!is_output(option)) require_folder(option, path);
      if (!is_read(option)) continue;
      require_there(option, path);
      if (!path.empty()) inputs.push_back(path);
    }
  std::set<fs::path> places;
  for (const Option& option : options.all()) {
    const bool log = option.names == "--log-file";
    auto* const* value = std::get_if<std::string*>(&option.value);
    if (!value || (*value)->empty() || !(log || is_output(option))) continue;
    const std::string given = **value;
    **value = settled(option, given, log);
    std::error_code failure;
    const auto place = fs::weakly_canonical(**value, failure);
    for (const auto& input : inputs)
      if (!failure) require_apart(given, place, input);
    if (!failure && !places.insert(place).second)
      refuse({given, "two outputs of this command", "a place for each", ""});
  }
}

}  // namespace emend::tools
