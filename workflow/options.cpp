#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/core/text.h>
#include <emend/editors/steps/statistics.h>
#include <emend/workflow/options.h>
#include <emend/workflow/save_formats.h>

namespace emend::workflow {

void require_valid(const RunOptions& options) {
  const auto at_least = [](const char* name, auto value, decltype(value) least, const char* expected) {
    if (!(value >= least)) refuse({setting(name), std::to_string(value), expected, ""});
  };
  const auto one_of = [](const char* name, const std::string& value, const std::vector<std::string>& known) {
    if (std::ranges::find(known, value) == known.end())
      refuse({setting(name), "\"" + value + "\"", "one of " + join(known), did_you_mean(value, known)});
  };
  one_of("on_collapse", options.on_collapse, {"warn", "skip", "stop", "revert"});
  at_least("batch_size", options.batch_size, 0, "a whole number from 0 on");
  at_least("spare_neurons", options.spare_neurons, kAsNeeded, "a whole number from 0 on");
  at_least("show", options.show, 0, "a whole number from 0 on");
  at_least("stats_tokens", options.stats_tokens, editors::kAutoTokens, "a whole number from 0 on");
  at_least("stats_length", options.stats_length, 1, "a whole number above 0");
  at_least("max_divergence", options.guard.divergence, 0, "a number from 0 on");
  at_least("max_update", options.guard.relative_update, 0, "a number from 0 on");
  at_least("max_condition", options.guard.condition, 0, "a number from 0 on");
  one_of("protocol", options.protocol, {"sequential", "lifelong", "single"});
  std::vector<std::string> forms = {"none"};
  for (const auto& format : save_formats()) forms.push_back(format.name);
  for (const auto& form : options.save) one_of("save", form, forms);
}

bool EvalSchedule::due(int64_t before, int64_t edits, int64_t n, bool tenths) const {
  if (tenths && !each && every == 0) return edits * 10 / n > before * 10 / n;
  return each || (every > 0 && edits / every > before / every);
}

EvalSchedule parse_eval_at(const std::vector<std::string>& items) {
  EvalSchedule schedule;
  for (const auto& item : items) {
    if (item == "end") continue;  // it always is
    if (schedule.each || schedule.every > 0)
      refuse({setting("eval_at"), "\"" + join(items, ",") + "\"", "each or every=N, once", ""});
    if (item == "each") {
      schedule.each = true;
    } else if (item.rfind("every=", 0) == 0 && item.size() > 6 && item.size() < 16 &&
               item.find_first_not_of("0123456789", 6) == std::string::npos && std::stoll(item.substr(6)) > 0) {
      schedule.every = std::stoll(item.substr(6));
    } else {
      refuse({setting("eval_at"), "\"" + item + "\"", "end, each or every=N with N of at least 1", ""});
    }
  }
  return schedule;
}

double parse_percent(const std::string& text, const std::string& name) {
  const std::string digits = text.ends_with('%') ? text.substr(0, text.size() - 1) : text;
  const double percent = number_in<double>(digits).value_or(-1);
  if (!(percent >= 0 && percent <= 100) ||
      (text == digits && percent > 0 && percent < 1))  // 0.95: of a hundred, or of one?
    refuse({setting(name), "\"" + text + "\"", "a share from 0% to 100%, such as 95%", ""});
  return percent;
}

at::ScalarType parse_dtype(const std::string& text, const std::string& name) {
  if (text == "float32" || text == "fp32") return at::kFloat;
  if (text == "bfloat16" || text == "bf16") return at::kBFloat16;
  if (text == "float64" || text == "fp64") return at::kDouble;
  const bool half = text == "float16" || text == "fp16";
  throw Error(ErrorClass::kInvalidArgument,
              {setting(name), "\"" + text + "\"", "float32, bfloat16 or float64",
               half ? "float16 checkpoints are computed in float32; use bfloat16 to save memory" : ""});
}

}  // namespace emend::workflow
