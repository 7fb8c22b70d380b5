#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/workflow/save_formats.h>

namespace emend::workflow {

#define EMEND_SAVE_FORMAT(name) SaveFormat save_##name();
#include <emend/workflow/save_formats.def>
#undef EMEND_SAVE_FORMAT

const std::vector<SaveFormat>& save_formats() {
  static const std::vector<SaveFormat> formats = {
#define EMEND_SAVE_FORMAT(name) save_##name(),
#include <emend/workflow/save_formats.def>
#undef EMEND_SAVE_FORMAT
  };
  return formats;
}

const SaveFormat& save_format(const std::string& name) {
  for (const auto& format : save_formats())
    if (format.name == name) return format;
  refuse({"save", "\"" + name + "\"", "one of " + join(save_formats(), ", ", &SaveFormat::name), ""});
}

}  // namespace emend::workflow
