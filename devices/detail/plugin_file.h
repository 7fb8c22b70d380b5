// Opening a plug-in library: a table of functions behind one symbol, checked by its version.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <filesystem>
#include <string>

namespace emend::devices::detail {

/// The file beside the program, or beside the library that `code` is in (a Python module), where one is there; else
/// the name alone, for the dynamic linker.
inline std::string plugin_file(const char* name, const void* code) {
  std::error_code error;
  std::filesystem::path files[2] = {std::filesystem::read_symlink("/proc/self/exe", error), {}};
  Dl_info info{};
  if (dladdr(code, &info) && info.dli_fname) files[1] = info.dli_fname;
  for (const auto& file : files)
    if (const auto beside = file.parent_path() / name; std::filesystem::exists(beside, error))
      return std::filesystem::absolute(beside, error);
  return name;
}

/// The table of a plug-in for `what`, or null and the reason in `text`. Libraries stay open.
template <class Plugin>
const Plugin* open_plugin(const std::string& file, const std::string& what, const char* entry, int32_t abi,
                          std::string& text) {
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* error = dlerror();
    text = "no " + what + " plug-in: " + std::string(error ? error : file);
    return nullptr;
  }
  const auto get = reinterpret_cast<const Plugin* (*)()>(dlsym(library, entry));
  const Plugin* plugin = get ? get() : nullptr;
  if (!plugin) {
    text = file + " is not a plug-in for " + what + ": it has no " + entry;
  } else if (plugin->abi != abi) {
    text = file + " has version " + std::to_string(plugin->abi) + " of the interface and this program " +
           std::to_string(abi) + ": build both from the same source";
    plugin = nullptr;
  }
  return plugin;
}

}  // namespace emend::devices::detail
