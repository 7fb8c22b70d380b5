#include <emend/core/error.h>
#include <emend/core/safetensors.h>
#include <emend/core/text.h>
#include <emend/workflow/card.h>
#include <emend/workflow/save_formats.h>

#include <fstream>

namespace emend::workflow {
namespace {

namespace fs = std::filesystem;

bool is_pack(const fs::path& file) {
  try {
    return editors::is_pack(SafetensorsFile(file));
  } catch (const Error&) {
    return false;
  }
}

bool is_gguf(const fs::path& file) {
  std::string mark(4, ' ');
  return std::ifstream(file, std::ios::binary).read(mark.data(), 4) && mark == "GGUF";
}

}  // namespace

#define EMEND_SAVE_FORMAT(name) SaveFormat save_##name();
#include <emend/workflow/save_formats.def>
#undef EMEND_SAVE_FORMAT

const std::vector<SaveFormat>& save_formats() {
  static const std::vector<SaveFormat> formats = [] {
    std::vector<SaveFormat> all = {
#define EMEND_SAVE_FORMAT(name) save_##name(),
#include <emend/workflow/save_formats.def>
#undef EMEND_SAVE_FORMAT
    };
    for (auto& format : all)
      format.write = [write = std::move(format.write)](const SaveRequest& request) {
        auto document = write(request);
        remove_card(request.out, request.lent.log);
        return document;
      };
    return all;
  }();
  return formats;
}

const SaveFormat& save_format(const std::string& name) {
  for (const auto& format : save_formats())
    if (format.name == name) return format;
  refuse({"save", "\"" + name + "\"", "one of " + join(save_formats(), ", ", &SaveFormat::name), ""});
}

void require_own_kind(const SaveFormat& format, const fs::path& out) {
  std::error_code failure;
  if (!fs::exists(out, failure) || fs::is_empty(out, failure)) return;
  const bool folder = !fs::path(format.file).has_extension();
  const auto own = [&] {
    if (fs::is_directory(out) != folder) return false;
    if (folder) return fs::exists(out / (format.name == "peft" ? "adapter_config.json" : "config.json"));
    return format.name == "pack" ? is_pack(out) : is_gguf(out);
  };
  if (!own())
    refuse({out.string(), std::string(fs::is_directory(out) ? "a folder" : "a file") + " that is no " + format.label,
            "a new path, or that of one to be replaced", "choose another place"});
}

void write_pack(const fs::path& out, const editors::EditPack& pack, const Log& log) {
  require_own_kind(save_format("pack"), out);
  editors::save_pack(out, pack);
  remove_card(out, log);
}

}  // namespace emend::workflow
