#include <emend/core/setting.h>

#include <algorithm>
#include <utility>

namespace emend {

static std::function<std::string(std::string_view)>& setting_spelling() {
  static std::function<std::string(std::string_view)> spelling;  // how one process talks; no model state
  return spelling;
}

std::string setting(std::string_view name, std::string_view value) {
  std::string text = setting_spelling() ? setting_spelling()(name) : std::string(name);
  if (!value.empty()) text.append(" ").append(value);
  return text;
}

void spell_settings(std::function<std::string(std::string_view name)> spelling) {
  setting_spelling() = std::move(spelling);
}

std::string option_spelling(std::string_view name) {
  std::string text = "--" + std::string(name);
  std::replace(text.begin(), text.end(), '_', '-');
  return text;
}

}  // namespace emend
