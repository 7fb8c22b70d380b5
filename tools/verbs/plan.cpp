// plan and doctor: what a run would need, and whether this machine is well.
#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/devices/doctor.h>
#include <emend/editors/settings.h>
#include <emend/models/family.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>

#include "../benchmarks.h"

namespace emend::tools {
namespace {

struct PlanArguments {
  ModelOptions model;
  std::string machine, compute_dtype = "float32";
  std::vector<int64_t> layers;
  devices::WorkShape work;
};

int run_plan(const PlanArguments& options, const Common& common) {
  const auto checkpoint = open_named(options.model);
  const auto config = models::parse_config(checkpoint->config(), checkpoint->path().string());
  auto work = options.work;
  work.editing_layers = options.layers;
  std::ranges::sort(work.editing_layers);
  if (work.editing_layers.empty())
    for (int64_t l = config.n_layers / 6; l < std::min(config.n_layers, config.n_layers / 6 + 5); ++l)
      work.editing_layers.push_back(l);
  work.first_gradient_layer =
      work.editing_layers.back() + 1 < config.n_layers ? work.editing_layers.back() + 1 : work.editing_layers.back();
  work.statistics = work.solve = true;
  work.cached_tokens = work.rows * work.tokens;
  const auto place = place_options(options.model);
  if (place.dtype == at::kFloat) {
    // The devices of a machine that is not here multiply bfloat16.
    const auto here =
        options.machine.empty() ? models::plan_model(place, config).placement.devices() : std::vector<c10::Device>();
    const auto arithmetic = editors::arithmetic_of({.compute_dtype = options.compute_dtype}, place.dtype, here);
    if (arithmetic.value_or(place.dtype) != place.dtype)
      work.copy_bytes = static_cast<int64_t>(c10::elementSize(*arithmetic));
  }
  const auto plan = models::plan_model(place, config, work, options.machine);
  const auto names = models::device_module_names(models::family_named(config.family), config);
  common.print(plan.to_json(names), plan.to_text());
  return plan.fits ? 0 : exit_code(ErrorClass::kDevice);
}

devices::Check check_tokenizer(const models::Checkpoint& checkpoint) {
  const auto tokenizer = checkpoint.load_tokenizer();
  if (!tokenizer)
    return {"tokenizer", devices::CheckStatus::kFailed, "the checkpoint has none",
            "copy the tokenizer files beside the weights"};
  const std::string text = "The Eiffel Tower is in Paris; 3.14 naïve 日本.";
  if (tokenizer->decode(tokenizer->encode_ids(text)) == text)
    return {"tokenizer", devices::CheckStatus::kOk, "a text comes back as it was", ""};
  return {"tokenizer", devices::CheckStatus::kWarning, "a text does not come back as it was",
          "expected of tokenizers that normalise; otherwise check the tokenizer files"};
}

// Loading refuses such weights; here all of them are named.
devices::Check check_weights(const models::Checkpoint& checkpoint) {
  constexpr size_t kNamed = 4;
  std::vector<std::string> bad;
  const auto tensors = checkpoint.tensors();
  for (const auto& info : tensors) {
    const at::Tensor weight = checkpoint.read(info.name);
    if (weight.is_floating_point() && !at::isfinite(weight).all().item<bool>()) bad.push_back(info.name);
  }
  if (bad.empty())
    return {"weights", devices::CheckStatus::kOk, counted(tensors.size(), "tensor") + ", all finite", ""};
  const std::string more = bad.size() > kNamed ? ", …" : "";
  const std::string number = counted(bad.size(), "tensor") + (bad.size() == 1 ? " holds" : " hold");
  bad.resize(std::min(bad.size(), kNamed));
  return {"weights", devices::CheckStatus::kFailed, number + " values that are not finite: " + join(bad) + more,
          "the checkpoint is damaged, or a float16 conversion overflowed: fetch it again"};
}

struct DoctorArguments {
  ModelOptions model;
  bool full = false;
};

int run_doctor(const ModelOptions& options, const Common& common) {
  const auto map = devices::parse_device_map(options.device_map);
  devices::MaxMemory limits;
  if (!options.max_memory.empty()) limits = devices::parse_max_memory(options.max_memory, map.numbered());
  auto checks = devices::check_machine(map, limits);
  const size_t of_machine = checks.size();
  const auto checkpoint = open_named(options);
  checks.push_back(check_tokenizer(*checkpoint));
  checks.push_back(check_weights(*checkpoint));
  bool failed = false, model_alone = true;
  auto document = nlohmann::ordered_json::array();
  std::string text;
  for (size_t i = 0; i < checks.size(); ++i) {
    const auto& check = checks[i];
    if (check.status == devices::CheckStatus::kFailed) failed = true, model_alone = model_alone && i >= of_machine;
    document.push_back(devices::to_json(check));
    text += std::string(devices::to_string(check.status)) + "  " + check.name + ": " + check.detail +
            (check.advice.empty() ? "" : " (" + check.advice + ")") + "\n";
  }
  common.print({{"checks", document}, {"well", !failed}}, text);
  return !failed ? 0 : exit_code(model_alone ? ErrorClass::kCorruption : ErrorClass::kDevice);
}

}  // namespace

VerbRun setup_plan(Options& o) {
  auto& options = o.arguments<PlanArguments>();
  auto& work = options.work;
  work.rows = 112;
  work.tokens = 32;
  work.facts = 16;
  work.gradients = true;
  work.suffix_tokens = 8;
  add_model_options(o, options.model);
  o.add("--simulate", &options.machine, "plan for a machine one does not have, such as 4x24GiB or 2x80GiB,cpu=64GiB",
        {.type = "MACHINE"})
      .add("--layers", &options.layers, "edited layers; default: five in the first third",
           {.limits = kNonNegative, .list = true});
  add_compute_option(o.group(""), options.compute_dtype);
  o.add("--rows", &work.rows, "rows of a batch", {.limits = {1, 1e4}})
      .add("--tokens", &work.tokens, "tokens of a row", {.limits = {1, 1e6}})
      .add("--facts", &work.facts, "facts of a batch", {.limits = {1, 1e9}});
  o.footer = "Example:\n  emend plan --model DIR --simulate 4x24GiB --device-map auto";
  return [&options](Common& common) { return run_plan(options, common); };
}

VerbRun setup_doctor(Options& o) {
  auto& options = o.arguments<DoctorArguments>();
  add_model_options(o, options.model);
  o.add("--full", &options.full,
        "check the machine itself, without a model: copies, edits of a tiny model on every device and pair, timings");
  for (const char* name : {"--model", "--dtype"}) o.at(name).excludes = "--full";
  o.footer = "Example:\n  emend doctor --full\n  emend doctor --model DIR";
  return [&options](Common& common) {
    return options.full ? run_full_check(options.model, common) : run_doctor(options.model, common);
  };
}

}  // namespace emend::tools
