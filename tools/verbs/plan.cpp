// plan and doctor: what a run would need, and whether this machine is well.
#include <emend/core/error.h>
#include <emend/devices/doctor.h>
#include <emend/models/family.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <iostream>

#include "../compute_options.h"
#include "../placement.h"
#include "../run_directory.h"

namespace emend::tools {

VerbRun setup_plan(CLI::App& command) {
  struct Options {
    ModelOptions model;
    std::string machine, compute_dtype = "float32";
    std::vector<int64_t> layers;
    devices::WorkShape work;
  };
  auto options = std::make_shared<Options>();
  add_model_options(command, options->model);
  auto& work = options->work;
  work.rows = 112;
  work.tokens = 32;
  work.facts = 16;
  work.gradients = true;
  work.suffix_tokens = 8;
  command
      .add_option("--simulate", options->machine,
                  "plan for a machine one does not have, such as 4x24GiB or 2x80GiB,cpu=64GiB")
      ->type_name("MACHINE");
  command.add_option("--layers", options->layers, "edited layers; default: five in the first third")->delimiter(',');
  add_compute_option(command, options->compute_dtype, "");
  command.add_option("--rows", work.rows, "rows of a batch")->check(CLI::PositiveNumber);
  command.add_option("--tokens", work.tokens, "tokens of a row")->check(CLI::PositiveNumber);
  command.add_option("--facts", work.facts, "facts of a batch")->check(CLI::PositiveNumber);
  return [options](Common& common) {
    const auto checkpoint = open_named(options->model);
    const auto config = models::parse_config(checkpoint->config(), checkpoint->path().string());
    auto work = options->work;
    work.editing_layers = options->layers;
    if (work.editing_layers.empty())
      for (int64_t l = config.n_layers / 6; l < std::min(config.n_layers, config.n_layers / 6 + 5); ++l)
        work.editing_layers.push_back(l);
    work.first_gradient_layer =
        work.editing_layers.back() + 1 < config.n_layers ? work.editing_layers.back() + 1 : work.editing_layers.back();
    work.statistics = work.solve = true;
    // auto: as on a machine that multiplies bfloat16 natively.
    if (options->model.dtype == "float32" && (options->compute_dtype == "auto" || options->compute_dtype == "bfloat16"))
      work.copy_bytes = 2;
    const auto plan = models::plan_model(place_options(options->model), config, work, options->machine);
    const auto names = models::device_module_names(models::family_named(config.family), config);
    std::cout << (common.json ? dump_json(plan.to_json(names)) + "\n" : plan.to_text());
    return plan.fits ? 0 : exit_code(ErrorClass::kDevice);
  };
}

VerbRun setup_doctor(CLI::App& command) {
  auto options = std::make_shared<ModelOptions>();
  add_model_options(command, *options);
  return [options](Common& common) {
    devices::MaxMemory limits;
    if (!options->max_memory.empty()) limits = devices::parse_max_memory(options->max_memory);
    auto checks = devices::check_machine(devices::parse_device_map(options->device_map), limits);
    const auto checkpoint = open_named(*options);
    if (const auto tokenizer = checkpoint->load_tokenizer()) {
      const std::string text = "The Eiffel Tower is in Paris; 3.14 naïve 日本.";
      const bool same = tokenizer->decode(tokenizer->encode_ids(text)) == text;
      checks.push_back({"tokenizer", same ? devices::CheckStatus::kOk : devices::CheckStatus::kWarning,
                        same ? "a text comes back as it was" : "a text does not come back as it was",
                        same ? "" : "expected of tokenizers that normalise; otherwise check the tokenizer files"});
    } else {
      checks.push_back({"tokenizer", devices::CheckStatus::kFailed, "the checkpoint has none",
                        "copy the tokenizer files beside the weights"});
    }
    bool failed = false;
    auto document = nlohmann::ordered_json::array();
    for (const auto& check : checks) {
      failed = failed || check.status == devices::CheckStatus::kFailed;
      document.push_back(devices::to_json(check));
      if (!common.json)
        std::cout << devices::to_string(check.status) << "  " << check.name << ": " << check.detail
                  << (check.advice.empty() ? "" : " (" + check.advice + ")") << '\n';
    }
    if (common.json) std::cout << dump_json({{"checks", document}, {"well", !failed}}) << '\n';
    return failed ? exit_code(ErrorClass::kDevice) : 0;
  };
}

}  // namespace emend::tools
