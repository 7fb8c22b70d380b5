#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/safetensors.h>
#include <emend/editors/detail/fixture_compare.h>
#include <emend/editors/detail/fixture_finetune.h>
#include <emend/editors/detail/fixture_locate.h>
#include <emend/editors/fixture.h>
#include <emend/editors/locate.h>
#include <emend/editors/registry.h>
#include <emend/editors/statistics.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/checkpoint.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <regex>
#include <set>

namespace emend::editors {
namespace {

using Tensors = std::map<std::string, at::Tensor>;
using detail::Comparison;
using detail::under;

nlohmann::json read_json_file(const std::filesystem::path& path) {
  try {
    return nlohmann::json::parse(read_file(path));
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorClass::kCorruption, {path.string(), error.what(), "JSON", ""});
  }
}

Tensors read_tensors(const std::filesystem::path& path) {
  const SafetensorsFile file(path);
  Tensors tensors;
  for (const auto& [name, info] : file.tensors()) tensors.emplace(name, file.tensor(name));
  return tensors;
}

// A checkpoint whose tokenizer lies elsewhere.
class WithTokenizer final : public models::Checkpoint {
 public:
  WithTokenizer(std::shared_ptr<const models::Checkpoint> inner, std::filesystem::path folder)
      : inner_(std::move(inner)), folder_(std::move(folder)) {}
  [[nodiscard]] const std::filesystem::path& path() const override { return inner_->path(); }
  [[nodiscard]] std::string format() const override { return inner_->format(); }
  [[nodiscard]] const nlohmann::json& config() const override { return inner_->config(); }
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const override { return inner_->tensors(); }
  [[nodiscard]] at::Tensor read(const std::string& name) const override { return inner_->read(name); }
  [[nodiscard]] std::unique_ptr<models::Tokenizer> load_tokenizer() const override {
    return models::load_tokenizer(folder_);
  }
  [[nodiscard]] std::string fingerprint() const override { return inner_->fingerprint(); }

 private:
  std::shared_ptr<const models::Checkpoint> inner_;
  std::filesystem::path folder_;
};

std::vector<datasets::Fact> read_requests(const std::filesystem::path& path) {
  std::vector<datasets::Fact> facts;
  for (const auto& row : read_json_file(path)) {
    datasets::Fact fact;
    fact.case_id = row.at("case_id");
    fact.prompt = row.at("prompt");
    fact.subject = row.at("subject");
    fact.target_new = row.at("target_new").at("str");
    fact.source = path.filename().string();
    facts.push_back(std::move(fact));
  }
  return facts;
}

// What the model computes for the plain prompts, under the fixture's names.
Tensors plain_outputs(const models::Model& model, const std::vector<datasets::Fact>& facts) {
  const at::NoGradGuard no_grad;
  const auto& tokenizer = model.tokenizer();
  std::vector<PromptRow> rows;
  std::vector<std::vector<int64_t>> ids;
  std::vector<int64_t> targets;
  for (const auto& fact : facts) {
    rows.push_back(render_prompt(tokenizer, fact.prompt, fact.subject, FactToken::kSubjectLast));
    ids.push_back(rows.back().ids);
    targets.push_back(target_token_ids(tokenizer, fact.full_prompt(), with_leading_space(fact.target_new)).at(0));
  }
  const auto batch = models::TokenBatch::from_rows(ids);
  hooks::HookSession session(model.hooks());
  session.capture({hooks::Site::kFinalNorm, -1}).attach();
  const at::Tensor logits_NV = model.forward(batch).logits;
  Tensors out;
  out["head_input"] = batch.unpack(session.captured({hooks::Site::kFinalNorm, -1}));
  session.finish();
  std::vector<int64_t> last;
  for (int64_t r = 0; r < batch.rows(); ++r) last.push_back(batch.token(r, -1));
  const at::Tensor logits_BV = logits_NV.index_select(0, at::tensor(last, at::kLong)).to(at::kFloat);
  out["last_logits_stride128"] = logits_BV.slice(1, 0, logits_BV.size(1), 128);
  out["last_logsumexp"] = logits_BV.logsumexp(1);
  out["last_argmax"] = logits_BV.argmax(1);
  out["last_logit_target0"] = logits_BV.gather(1, at::tensor(targets, at::kLong).unsqueeze(1)).squeeze(1);
  const int64_t pad = tokenizer.pad_id().value_or(tokenizer.eos_id().value_or(0));
  at::Tensor padded = at::full({batch.rows(), batch.longest()}, pad, at::kLong), mask = at::zeros_like(padded);
  for (int64_t r = 0; r < batch.rows(); ++r) {
    padded[r].narrow(0, 0, batch.length(r)).copy_(at::tensor(ids[static_cast<size_t>(r)], at::kLong));
    mask[r].narrow(0, 0, batch.length(r)).fill_(1);
  }
  out["input_ids"] = padded;
  out["attention_mask"] = mask;
  return out;
}

// One editor on one model: what was recorded, and the machinery to do it again.
class FixtureRun {
 public:
  FixtureRun(const std::filesystem::path& folder, const std::string& model_name, const std::string& editor_name,
             models::Model& model, Engine engine, const Log& log, const FixtureFilter& wanted)
      : folder_(folder),
        model_name_(model_name),
        editor_name_(editor_name),
        model_(model),
        engine_(engine),
        log_(log),
        wanted_(wanted),
        expected_(read_tensors(folder / ("expected." + model_name + "." + editor_name + ".safetensors"))),
        facts_(read_requests(folder / "requests.json")),
        hparams_(read_json_file(folder / "hparams.json")) {
    const auto losses = folder / ("losses." + model_name + "." + editor_name + ".json");
    losses_ = std::filesystem::exists(losses) ? read_json_file(losses) : nlohmann::json::object();
    std::map<int, SecondMoment> moments;
    for (const auto& [name, cov] : read_tensors(folder / ("cov." + model_name + ".safetensors")))
      moments.emplace(std::stoi(name.substr(name.rfind('.') + 1)), SecondMoment(cov));
    statistics_ = std::make_unique<FixedStatistics>(std::move(moments));
    const auto contexts = read_json_file(folder / "contexts.json");
    nested_ = parse_contexts(contexts.at("memit"), "contexts.json");
    flat_ = parse_contexts(contexts.at("rome"), "contexts.json");
  }

  Comparison run() {
    compare_outputs(comparison_, under(expected_, "before."), plain_outputs(model_, facts_), "before.", false);
    for (const auto& [variant, values] : hparams_.at("editors").at(editor_name_).items()) {
      raw_ = hparams_of(values);
      const std::string prefix = variant + ".";
      if (under(expected_, prefix).empty() || (wanted_ && !wanted_(model_name_, editor_name_, variant))) continue;
      const auto cases = numbers_after(prefix + "case.");
      if (!cases.empty()) {
        run_cases(prefix, cases);
      } else {
        run_batches(prefix);
      }
    }
    return comparison_;
  }

 private:
  hparams::RawHparams hparams_of(nlohmann::json values) const {
    const auto& modules = hparams_.at("modules").at(model_name_);
    for (const char* name : {"rewrite_module_tmp", "layer_module_tmp", "mlp_module_tmp", "attn_module_tmp",
                             "ln_f_module", "lm_head_module"})
      if (modules.contains(name)) values[name] = modules.at(name);
    if (values.contains("v_num_grad_steps")) values["v_stop_loss"] = hparams_.value("stop_loss", 0.05);
    detail::complete_finetune_values(editor_name_, values);
    return hparams::parse_hparams(values.dump(), "hparams.json");
  }

  // The distinct numbers N of "{stem}N." among the expected names, ascending.
  [[nodiscard]] std::vector<int64_t> numbers_after(const std::string& stem) const {
    std::set<int64_t> numbers;
    for (const auto& [name, tensor] : under(expected_, stem))
      if (!name.empty() && std::isdigit(static_cast<unsigned char>(name[0]))) numbers.insert(std::stoll(name));
    return {numbers.begin(), numbers.end()};
  }

  [[nodiscard]] std::vector<datasets::Fact> facts_of(const std::vector<int64_t>& cases) const {
    std::vector<datasets::Fact> selected;
    for (const auto& fact : facts_)
      if (std::find(cases.begin(), cases.end(), fact.case_id) != cases.end()) selected.push_back(fact);
    return selected;
  }

  EditContext context(Trace& trace, EditTransaction& transaction, const ContextTemplates& contexts) const {
    EditContext context;
    context.engine = engine_;
    context.contexts = contexts;
    context.statistics = statistics_.get();
    context.transaction = &transaction;
    context.trace = &trace;
    context.log = log_;
    return context;
  }

  // Editors that go one fact at a time: "VARIANT.case.I.…". Variants called seq… keep the model between facts.
  void run_cases(const std::string& prefix, const std::vector<int64_t>& cases) {
    const bool sequence = prefix.starts_with("seq");
    auto transaction = std::make_unique<EditTransaction>(model_);
    for (size_t i = 0; i < cases.size(); ++i) {
      if (!sequence) {
        transaction.reset();  // restores
        transaction = std::make_unique<EditTransaction>(model_);
      }
      const bool pristine = !sequence || i == 0;
      const std::string unit = prefix + "case." + std::to_string(cases[i]) + ".";
      Trace trace;
      EditContext edit_context = context(trace, *transaction, flat_);
      edit_alone(unit, facts_of({cases[i]}), edit_context);
      const Tensors got = under(trace, "case." + std::to_string(cases[i]) + ".");
      const Tensors want = under(expected_, unit);
      compare_target(comparison_, under(want, "z."), under(got, "z."), unit + "z.", pristine);
      if (const std::string key = unit + "z"; losses_.contains(key))
        compare_losses(comparison_, losses_[key], under(got, "z."), unit + "z.", pristine);
      compare_traced(unit, want, got, {"z.", "after."}, true, pristine);
      check_rank_one(unit, want);
      compare_outputs(comparison_, under(want, "after."), plain_outputs(model_, facts_), unit + "after.", true);
    }
  }

  void edit_alone(const std::string& unit, const std::vector<datasets::Fact>& facts, EditContext& edit_context) {
    const auto editor = make_editor(editor_name_, raw_, model_, log_);
    const EditResult result = editor->edit(model_, facts, edit_context);
    for (const auto& outcome : result.outcomes)
      if (outcome.status == FactStatus::kFailed) comparison_.fail(unit, outcome.reason);
  }

  // Identities between recorded tensors and our own steps: u from the recorded keys, v and the change from the recorded
  // inputs.
  void check_rank_one(const std::string& unit, const Tensors& want) {
    for (const char* needed :
         {"keys_per_context", "u", "v", "v_target", "cur_output", "division_factor", "weight_change"})
      if (!want.contains(needed)) return;
    const int layer = static_cast<int>(std::stoll(raw_.find("layers")->value.items.at(0).text));
    at::Tensor direction_F1 = want.at("keys_per_context").to(at::kDouble).mean(0, true).t();
    const hparams::RawEntry* adjustment = raw_.find("mom2_adjustment");
    if (adjustment && adjustment->value.text == "true")
      direction_F1 = solve_preserved(direction_F1, {statistics_->get(layer), 1, 0, {}, {}});
    comparison_.add("u_from_stored", unit + "u from stored keys", want.at("u"),
                    (direction_F1 / direction_F1.norm()).squeeze(1), {detail::Measure::kRelative, 1e-4});
    const at::Tensor v_D = (want.at("v_target").to(at::kDouble) - want.at("cur_output").to(at::kDouble).mean(0)) /
                           want.at("division_factor").to(at::kDouble);
    comparison_.add("v_from_stored", unit + "v from stored inputs", want.at("v"), v_D,
                    {detail::Measure::kRelative, 1e-5});
    comparison_.add("weight_change_from_stored", unit + "weight_change from stored u and v", want.at("weight_change"),
                    want.at("v").to(at::kDouble).unsqueeze(1).mm(want.at("u").to(at::kDouble).unsqueeze(0)),
                    {detail::Measure::kRelative, 1e-5});
  }

  // Batch editors: "VARIANT.z.I.…", or "VARIANT.batchB.z.I.…" with one editor instance for all batches.
  void run_batches(const std::string& prefix) {
    EditTransaction transaction(model_);
    const auto editor = make_editor(editor_name_, raw_, model_, log_);
    std::vector<std::string> units;
    for (int64_t b = 0; !under(expected_, prefix + "batch" + std::to_string(b) + ".").empty(); ++b)
      units.push_back(prefix + "batch" + std::to_string(b) + ".");
    const bool batches = !units.empty();
    if (!batches) units.push_back(prefix);
    for (size_t i = 0; i < units.size(); ++i) {
      auto cases = numbers_after(units[i] + "z.");
      if (cases.empty())
        for (const auto& fact : facts_) cases.push_back(fact.case_id);  // editors without targets
      Trace trace;
      EditContext edit_context = context(trace, transaction, nested_);
      check_recorded(units, i);
      const EditResult result = editor->edit(model_, facts_of(cases), edit_context);
      for (const auto& outcome : result.outcomes)
        if (outcome.status == FactStatus::kFailed) comparison_.fail(units[i], outcome.reason);
      detail::add_memory(trace, *editor);
      compare_batch(units[i], under(expected_, units[i]), trace, cases, i == 0);
      if (const auto losses = losses_.find(units[i].substr(0, units[i].size() - 1)); losses != losses_.end())
        detail::compare_training_losses(comparison_, *losses, trace, units[i]);
    }
    if (batches) compare_totals(prefix, transaction);
    if (const auto projectors = expected_.find(prefix + "P"); projectors != expected_.end())
      detail::compare_projectors(comparison_, projectors->first, projectors->second, *statistics_,
                                 editor->statistics_layers(), editor->hparams().at("nullspace_threshold"));
  }

  void compare_batch(const std::string& unit, const Tensors& want, const Trace& trace,
                     const std::vector<int64_t>& cases, bool pristine) {
    for (const int64_t number : cases) {
      const std::string key = "z." + std::to_string(number);
      if (const Tensors target = under(want, key + "."); !target.empty())
        compare_target(comparison_, target, under(trace, key + "."), unit + key + ".", pristine);
      if (losses_.contains(unit + key))
        compare_losses(comparison_, losses_[unit + key], under(trace, key + "."), unit + key + ".", pristine);
    }
    Tensors rest = want;
    std::erase_if(rest, [](const auto& entry) { return entry.first.starts_with("z."); });
    compare_traced(unit, rest, trace, {"after."}, false, pristine);
    compare_outputs(comparison_, under(want, "after."), plain_outputs(model_, facts_), unit + "after.", true);
  }

  // All expected tensors but those under `apart`, against the trace.
  void compare_traced(const std::string& unit, const Tensors& want, const Tensors& got,
                      const std::vector<std::string>& apart, bool always_first_layer, bool pristine) {
    const std::string first = first_layer_prefix(want);
    for (const auto& [name, tensor] : want) {
      if (std::any_of(apart.begin(), apart.end(), [&, &n = name](const std::string& p) { return n.starts_with(p); }))
        continue;
      const auto found = got.find(name);
      if (found == got.end()) {
        comparison_.fail(unit + name, "not computed");
      } else if (editor_name_ == "rect" && name.ends_with(".weight_change")) {
        detail::compare_masked(comparison_, unit + name, tensor, found->second);
      } else if (!compare_named(comparison_, unit + name, tensor, found->second,
                                always_first_layer || name.starts_with(first), pristine)) {
        comparison_.add("other", unit + name, tensor, found->second, {detail::Measure::kRelative, 1e-3});
      }
    }
  }

  static std::string first_layer_prefix(const Tensors& want) {
    int64_t lowest = -1;
    for (const auto& [name, tensor] : under(want, "layer.")) {
      const int64_t layer = std::stoll(name);
      if (lowest < 0 || layer < lowest) lowest = layer;
    }
    return "layer." + std::to_string(lowest) + ".";
  }

  // The update of batch `index`, by an editor that remembers what was recorded before it.
  void check_recorded(const std::vector<std::string>& units, size_t index) {
    const auto editor = make_editor(editor_name_, raw_, model_, log_);
    if (index > 0) {
      const auto memory = expected_.find(units[index - 1] + "cache_after");
      if (memory == expected_.end()) return;
      detail::set_memory(*editor, memory->second);
    }
    check_update(*editor, units[index]);
  }

  // The editor's own update from the recorded keys and residuals.
  void check_update(const Editor& editor, const std::string& unit) {
    const auto* locate = dynamic_cast<const LocateEditor*>(&editor);
    if (!locate) return;
    const auto layers = numbers_after(unit + "layer.");
    for (size_t i = 0; i < layers.size(); ++i) {
      const Tensors want = under(expected_, unit + "layer." + std::to_string(layers[i]) + ".");
      if (!want.contains("keys") || !want.contains("resid") || !want.contains("update")) continue;
      LayerProblem problem;
      problem.layer = static_cast<int>(layers[i]);
      problem.index = i;
      problem.count = layers.size();
      problem.site = model_.edit_site(problem.layer);
      const at::Tensor weight = model_.weight(problem.site.weight_name);
      problem.weight_DF = problem.site.orientation == models::Orientation::kInOut ? weight.t() : weight;
      problem.keys_FN = want.at("keys").to(at::kDouble);
      problem.residual_DN = want.at("resid").to(at::kDouble);
      problem.moment = statistics_->get(problem.layer);
      const LayerUpdate update = locate->update(problem);
      const std::string name = unit + "layer." + std::to_string(problem.layer) + ".";
      const double limit =
          want.at("update").scalar_type() == at::kDouble ? 1e-9 : 1e-4;  // float32: recorded from a float32 solve
      if (want.contains("adj_k") && update.delta.low_rank())
        comparison_.add("adj_k_from_stored", name + "adj_k from stored keys", want.at("adj_k"), update.delta.right_FR,
                        {detail::Measure::kRelative, limit});
      comparison_.add("update_from_stored", name + "update from stored keys", want.at("update"), update.delta.matrix(),
                      {detail::Measure::kRelative, limit});
      if (want.contains("weight_change"))
        detail::compare_settled(comparison_, name + "weight_change from stored keys", want.at("weight_change"), *locate,
                                problem, update.delta);
    }
  }

  // "VARIANT.layer.L.weight_change": over all batches; "VARIANT.P" and the like: recorded by the editor in its first
  // batch.
  void compare_totals(const std::string& prefix, const EditTransaction& transaction) {
    for (const int64_t layer : numbers_after(prefix + "layer.")) {
      const std::string name = prefix + "layer." + std::to_string(layer) + ".weight_change";
      if (!expected_.contains(name)) continue;
      const models::EditSite site = model_.edit_site(static_cast<int>(layer));
      at::Tensor change = model_.weight(site.weight_name) - transaction.originals().at(site.weight_name);
      if (site.orientation == models::Orientation::kInOut) change = change.t();
      (void)compare_named(comparison_, name, expected_.at(name), change, false, false);
    }
  }

  std::filesystem::path folder_;
  std::string model_name_, editor_name_;
  models::Model& model_;
  Engine engine_;
  Log log_;
  const FixtureFilter& wanted_;
  Tensors expected_;
  std::vector<datasets::Fact> facts_;
  nlohmann::json hparams_, losses_;
  std::unique_ptr<FixedStatistics> statistics_;
  ContextTemplates nested_, flat_;
  hparams::RawHparams raw_;
  Comparison comparison_;
};

models::Model load_fixture_model(const std::filesystem::path& folder, const std::string& name, const Log& log) {
  auto checkpoint = models::open_checkpoint((folder / name).string());
  const auto hparams = read_json_file(folder / "hparams.json");
  if (hparams.contains("tokenizers") && hparams["tokenizers"].contains(name))
    checkpoint = std::make_shared<WithTokenizer>(checkpoint, folder / hparams["tokenizers"][name].get<std::string>());
  models::LoadOptions options;
  options.log = &log;
  return models::load_model(std::move(checkpoint), options);
}

bool is_registered(const std::string& name) {
  try {
    (void)find_editor(name);
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

nlohmann::json eval_editor_fixture(const std::filesystem::path& folder, Engine engine, const Log& log,
                                   const FixtureFilter& wanted) {
  if (!std::filesystem::is_directory(folder))
    throw Error(ErrorClass::kNotFound, {folder.string(), "no such folder", "a folder of editor fixtures", ""});
  std::map<std::string, std::vector<std::string>> editors_of_model;
  static const std::regex pattern(R"(expected\.(.+)\.([A-Za-z0-9_-]+)\.safetensors)");
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::smatch match;
    const std::string file = entry.path().filename().string();
    if (std::regex_match(file, match, pattern)) editors_of_model[match[1]].push_back(match[2]);
  }
  if (editors_of_model.empty())
    throw Error(ErrorClass::kNotFound,
                {folder.string(), "no expected.MODEL.EDITOR.safetensors", "a folder of editor fixtures", ""});

  nlohmann::json report = nlohmann::json::object();
  std::map<std::string, Comparison> totals;
  std::map<std::string, nlohmann::json> by_model;
  std::set<std::string> missing;
  for (auto& [model_name, editors] : editors_of_model) {
    std::sort(editors.begin(), editors.end());
    models::Model model = load_fixture_model(folder, model_name, log);
    for (const auto& editor : editors) {
      if (!is_registered(editor)) {
        missing.insert(editor);
        continue;
      }
      log.info("fixture", "checking " + editor + " on " + model_name);
      const Comparison comparison = FixtureRun(folder, model_name, editor, model, engine, log, wanted).run();
      totals[editor].merge(comparison);
      by_model[editor][model_name] = comparison.to_json();
    }
  }
  for (const auto& [editor, comparison] : totals) {
    report[editor] = comparison.to_json();
    report[editor]["models"] = by_model[editor];
  }
  if (!missing.empty()) report["missing"] = missing;
  return report;
}

}  // namespace emend::editors
