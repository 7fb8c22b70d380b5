// Two edits side by side: facts, weights, and what the edited models say.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/json.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <emend/datasets/lint.h>
#include <emend/editors/packs/difference.h>
#include <emend/editors/packs/ledger.h>
#include <emend/editors/packs/merge.h>
#include <emend/evaluation/health.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "../options.h"

namespace emend::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr size_t kPromptsAtOnce = 64;  // bounds the memory for distributions

struct DiffArguments {
  ModelOptions model;
  std::string a, b, prompts;
  size_t top = 10;     // prompts shown
  int64_t tokens = 4;  // of each distribution
};

// What a path names: a pack, the run that made one, or a model with the edits in force in it.
struct EditSource {
  std::string name;  // as it was given
  std::string kind;  // "pack", "run" or "model"
  // Everything that is in force against pack.base_fingerprint; of a model without edits, no change at all.
  editors::EditPack pack;
  std::vector<std::string> ids;                          // of a model's edits in force, in their order
  std::shared_ptr<const models::Checkpoint> checkpoint;  // of a model

  [[nodiscard]] bool is_model() const noexcept { return checkpoint != nullptr; }
};

void read_model(EditSource& source) {
  source.kind = "model";
  source.checkpoint = models::open_checkpoint(source.name);
  const fs::path folder = source.checkpoint->path();
  source.pack.facts = nlohmann::json::array();
  for (const auto& [name, edit] : editors::described_edits(folder)) {
    append_item(source.pack.editor, edit.editor, "+");
    source.pack.facts.insert(source.pack.facts.end(), edit.facts.begin(), edit.facts.end());
  }
  const auto packs = editors::packs_in_force(folder);
  for (const auto& [name, pack] : packs) source.ids.push_back(pack.id);
  if (!packs.empty()) source.pack = editors::merge_packs(packs, editors::OnConflict::kSum).pack;
  const auto base = editors::lineage_of(folder).base;
  source.pack.base_fingerprint = base.empty() ? models::model_fingerprint(*source.checkpoint) : base;
}

// "98.7 % of the change survived" of the weight that kept least, or nothing if no rounding was recorded.
std::string survival_text(const nlohmann::json& extra) {
  const auto survived = extra.is_object() ? extra.value("survived", nlohmann::json()) : nlohmann::json();
  double least = 1;
  if (!survived.is_object() || survived.empty()) return "";
  for (const auto& [weight, share] : survived.items())
    if (share.is_number()) least = std::min(least, share.get<double>());
  const auto dtype = extra.find("dtype");
  return percent(least) + " of the change survived " +
         (dtype != extra.end() && dtype->is_string() ? dtype->get<std::string>() : "rounding");
}

// "memit, 3 facts" or "no edits"
std::string summary_of(const EditSource& source) {
  if (source.pack.editor.empty()) return "no edits";
  const size_t facts = source.pack.facts.size();
  std::string text = source.pack.editor + ", " + counted(facts, "fact");
  if (source.ids.size() > 1) text += " in " + std::to_string(source.ids.size()) + " packs";
  if (const auto survived = survival_text(source.pack.extra); !survived.empty()) text += ", " + survived;
  return text;
}

// A pack file, a run folder, a model folder (with its ledger), a GGUF file or ORG/NAME.
EditSource open_edit_source(const std::string& name) {
  EditSource source;
  source.name = name;
  const fs::path path(name);
  if (fs::is_directory(path) && fs::exists(path / "edit.safetensors") && !fs::exists(path / "config.json")) {
    source.kind = "run";
    source.pack = editors::load_pack(path / "edit.safetensors");
  } else if (fs::is_directory(path) && fs::exists(path / "results.json")) {
    throw Error(ErrorClass::kNotFound, {name, "a run folder without edit.safetensors", "a run that saved its pack",
                                        "repeat the run with --save pack"});
  } else if (fs::is_regular_file(path) && path.extension() != ".gguf") {
    source.kind = "pack";
    source.pack = editors::load_pack(path);
  } else {
    read_model(source);
  }
  return source;
}

ordered_json describe(const EditSource& source) {
  return {{"name", source.name},
          {"kind", source.kind},
          {"base", source.pack.base_fingerprint},
          {"editor", source.pack.editor},
          {"facts", source.pack.facts.size()},
          {"edits", source.ids},
          {"survived", source.pack.extra.is_object() ? source.pack.extra.value("survived", nlohmann::json::object())
                                                     : nlohmann::json::object()},
          {"summary", summary_of(source)}};
}

ordered_json describe(const editors::FactDifference& facts) {
  auto changed = ordered_json::array();
  for (const auto& fact : facts.changed) changed.push_back({{"prompt", fact.question}, {"a", fact.a}, {"b", fact.b}});
  return {{"only_a", facts.only_a}, {"only_b", facts.only_b}, {"changed", changed}, {"same", facts.same}};
}

ordered_json describe(const editors::WeightDifference& weight) {
  const auto optional = [](const std::optional<double>& value) {
    return value ? ordered_json(*value) : ordered_json();
  };
  const auto relative = [&](double norm) {
    return weight.base && *weight.base > 0 ? ordered_json(norm / *weight.base) : ordered_json();
  };
  return {{"weight", weight.weight},
          {"base_norm", optional(weight.base)},
          {"a_norm", weight.a},
          {"b_norm", weight.b},
          {"a_relative", relative(weight.a)},
          {"b_relative", relative(weight.b)},
          {"difference_norm", weight.between},
          {"cosine", optional(weight.cosine)}};
}

// The default model, if it is installed and the pack was made for it.
std::shared_ptr<const models::Checkpoint> default_base(const editors::EditPack& pack) {
  try {
    auto checkpoint = models::open_checkpoint(default_model_path().string());
    return models::model_fingerprint(*checkpoint) == pack.base_fingerprint ? checkpoint : nullptr;
  } catch (const Error&) {
    return nullptr;
  }
}

// The unedited model of both sides: one of them, --model, or the default model. Null where none is known.
std::shared_ptr<const models::Checkpoint> base_of(const EditSource& a, const EditSource& b,
                                                  const DiffArguments& options) {
  if (!options.model.model.empty()) return models::open_checkpoint(options.model.model);
  for (const auto& [source, other] : {std::pair(&a, &b), std::pair(&b, &a)})
    if (source->is_model() && source->ids.empty() && other->pack.base_fingerprint == source->pack.base_fingerprint)
      return source->checkpoint;
  return a.is_model() && b.is_model() ? nullptr : default_base((a.is_model() ? b : a).pack);
}

// A model of unknown origin against the base that was named.
void measure_against(const models::Checkpoint& base, const std::string& fingerprint, EditSource& source) {
  if (source.pack.base_fingerprint == fingerprint || !source.is_model()) return;
  source.pack.deltas = editors::deltas_between(base, *source.checkpoint);
  source.pack.base_fingerprint = fingerprint;
}

// Norms are shares of the base's: refuses a base that neither side was made for. Of two models without edits any may be
// it.
void require_base_of_both(const EditSource& a, const EditSource& b, const models::Checkpoint& base,
                          const std::string& fingerprint) {
  const auto plain = [](const EditSource& source) { return source.is_model() && source.ids.empty(); };
  const auto is_of = [&](const EditSource& source) {
    return source.pack.base_fingerprint == fingerprint || source.pack.root() == fingerprint;
  };
  if ((plain(a) && plain(b)) || is_of(a) || is_of(b)) return;
  refuse({base.path().string(), "the model " + fingerprint.substr(0, 12),
          "that of " + a.name + " and " + b.name + ", " + a.pack.root().substr(0, 12),
          "name it, or leave --model out"});
}

// Brings both sides to changes against one model. True if nothing is known of one and A stands for it.
bool relate(EditSource& a, EditSource& b, const models::Checkpoint* base) {
  const std::string fingerprint = base ? models::model_fingerprint(*base) : "";
  if (a.pack.base_fingerprint == b.pack.base_fingerprint) {
    if (base) require_base_of_both(a, b, *base, fingerprint);
    return false;
  }
  if (base) {
    measure_against(*base, fingerprint, a);
    measure_against(*base, fingerprint, b);
  } else if (a.is_model() && b.is_model()) {  // A as it is stands for the base
    a.pack.deltas.clear();
    measure_against(*a.checkpoint, a.pack.base_fingerprint, b);
  }
  if (a.pack.base_fingerprint == b.pack.base_fingerprint) return !base;
  refuse(
      {a.name + " and " + b.name,
       "made for the models " + a.pack.base_fingerprint.substr(0, 12) + " and " + b.pack.base_fingerprint.substr(0, 12),
       "two edits of one model", "a model folder is compared with a pack through --model BASE, the unedited one"});
}

std::vector<std::string> read_prompts(const std::string& path) {
  std::string text = read_file(path);
  if (text.starts_with(kByteOrderMark)) text.erase(0, kByteOrderMark.size());
  std::vector<std::string> prompts;
  std::optional<JsonFault> no_json;  // then it is one prompt a line
  const auto document = parse_json(text, {}, no_json);
  if (document.is_array()) {
    if (std::ranges::any_of(document, [](const auto& item) { return !item.is_string(); }))
      refuse({path, "an array with other things than strings", "an array of prompts", ""});
    prompts = document.get<std::vector<std::string>>();
  } else {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      line.erase(line.find_last_not_of("\r ") + 1);
      if (!line.empty()) prompts.push_back(line);
    }
  }
  for (const auto& prompt : prompts) datasets::require_prompt_size(path, prompt);
  if (prompts.empty()) refuse({path, "no prompts", "one prompt a line, or a JSON array of strings", ""});
  return prompts;
}

// What one side says about the next token: a model as it is (its weights are in the files), or the base with a pack.
class Speaker {
 public:
  Speaker(const EditSource& source, const DiffArguments& options, const Common& common)
      : model_(load(source, options, common)), packs_(source.is_model() ? Packs(model_) : Packs()) {
    if (!source.is_model()) packs_.add(model_, source.pack, source.name);
  }

  [[nodiscard]] at::Tensor log_probs(std::vector<std::string> prompts, const Common& common) const {
    for (auto& prompt : prompts) prompt = packs_.runtime().prefix(prompt) + prompt;
    return evaluation::next_token_log_probs(model_, prompts, {.cancel = common.cancel});
  }
  [[nodiscard]] const models::Model& model() const noexcept { return model_; }

 private:
  static models::Model load(const EditSource& source, const DiffArguments& options, const Common& common) {
    ModelOptions own = options.model;
    if (source.is_model()) own.model = source.name;
    return load_named(own, common);
  }

  models::Model model_;
  Packs packs_;
};

ordered_json top_tokens(const at::Tensor& log_probs_V, int64_t n, const models::Tokenizer& tokenizer) {
  const auto [values, tokens] = log_probs_V.topk(std::min<int64_t>(n, log_probs_V.size(0)));
  auto list = ordered_json::array();
  for (int64_t i = 0; i < values.size(0); ++i)
    list.push_back({{"token", tokenizer.decode_more(std::vector{tokens[i].item<int64_t>()})},
                    {"probability", std::exp(values[i].item<double>())}});
  return list;
}

ordered_json compare_speech(const EditSource& a, const EditSource& b, const DiffArguments& options,
                            const Common& common) {
  const at::NoGradGuard no_grad;
  const auto prompts = read_prompts(options.prompts);
  const Speaker one(a, options, common), two(b, options, common);
  std::vector<ordered_json> rows;
  double sum = 0;
  for (size_t begin = 0; begin < prompts.size(); begin += kPromptsAtOnce) {
    const size_t end = std::min(begin + kPromptsAtOnce, prompts.size());
    const std::vector<std::string> some(prompts.begin() + begin, prompts.begin() + end);
    const at::Tensor said_a = one.log_probs(some, common), said_b = two.log_probs(some, common);
    const at::Tensor kl = evaluation::divergences(said_a, said_b);
    for (size_t i = 0; i < some.size(); ++i) {
      const auto row = static_cast<int64_t>(i);
      const double value = std::max(0.0, kl[row].item<double>());
      sum += value;
      rows.push_back({{"prompt", some[i]},
                      {"kl", value},
                      {"a", top_tokens(said_a[row], options.tokens, one.model().tokenizer())},
                      {"b", top_tokens(said_b[row], options.tokens, two.model().tokenizer())}});
    }
  }
  std::ranges::stable_sort(
      rows, [](const ordered_json& x, const ordered_json& y) { return x["kl"].get<double>() > y["kl"].get<double>(); });
  const double mean = sum / static_cast<double>(rows.size());
  const double largest = rows.front()["kl"];
  return {
      {"file", options.prompts}, {"n", prompts.size()}, {"mean_kl", mean}, {"max_kl", largest}, {"most_changed", rows}};
}

std::string facts_text(const ordered_json& facts) {
  constexpr size_t kShown = 20;
  std::string text = "Facts   " + std::to_string(facts["only_a"].size()) + " only in A · " +
                     std::to_string(facts["only_b"].size()) + " only in B · " +
                     std::to_string(facts["changed"].size()) + " answered differently · " + facts["same"].dump() +
                     " the same\n";
  size_t n = 0;
  const auto add = [&](const std::string& mark, const std::string& question, const std::string& answer) {
    if (++n <= kShown) text += "  " + mark + " " + shortened(question, 70) + " → " + shortened(answer, 40) + "\n";
  };
  for (const auto& fact : facts["changed"])
    add("A≠B", fact["prompt"], fact["a"].get<std::string>() + " (A), " + fact["b"].get<std::string>() + " (B)");
  for (const char* side : {"only_a", "only_b"})
    for (const auto& fact : facts[side])
      add(side == std::string("only_a") ? "A  " : "B  ", editors::question_of(fact), fact.value("target_new", ""));
  if (n > kShown) text += "  … and " + std::to_string(n - kShown) + " more (--json has all)\n";
  return text;
}

std::string norm_text(const ordered_json& weight, const std::string& side) {
  if (weight[side + "_norm"] == 0) return "–";
  std::string text = short_number(weight[side + "_norm"]);
  if (const auto& share = weight[side + "_relative"]; share.is_number()) text += " (" + percent(share) + ")";
  return text;
}

std::string weights_text(const ordered_json& weights, bool from_a) {
  if (weights.empty()) return "Weights   the same\n";
  if (from_a) {
    TextTable table({"", "‖B − A‖"});
    for (const auto& weight : weights) table.add({weight["weight"], norm_text(weight, "b")});
    return "Weights   how far B is from A; which of them was moved is known with the unedited model (--model BASE)\n" +
           table.text();
  }
  const bool relative = weights[0]["a_relative"].is_number();
  TextTable table({"", "‖ΔA‖", "‖ΔB‖", "‖ΔB − ΔA‖", "cosine"});
  for (const auto& weight : weights)
    table.add({weight["weight"], norm_text(weight, "a"), norm_text(weight, "b"),
               short_number(weight["difference_norm"]),
               weight["cosine"].is_number() ? short_number(weight["cosine"]) : "–"});
  return "Weights   how far each was moved" + std::string(relative ? " (share of its norm)" : "") +
         " and whether the same way\n" + table.text();
}

std::string beside_text(const ordered_json& beside) {
  if (beside.empty()) return "";
  return "Beside the weights   " +
         join(beside, " · ",
              [](const ordered_json& part) {
                const bool in_a = part["in_a"], in_b = part["in_b"], same = part["same"];
                const char* how = same ? " the same" : in_a && in_b ? " differs" : in_a ? " only in A" : " only in B";
                return part["kind"].get<std::string>() + how;
              }) +
         "\n";
}

std::string speech_text(const ordered_json& speech, size_t top) {
  const auto tokens = [](const ordered_json& list) {
    return join(list, "  ", [](const ordered_json& one) {
      return dump_json(one["token"], -1) + " " + short_number(one["probability"]);
    });
  };
  std::string text = "Next tokens   " + counted(speech["n"].get<size_t>(), "prompt") + ", KL(A‖B) " +
                     short_number(speech["mean_kl"]) + " nat on average, " + short_number(speech["max_kl"]) +
                     " at most\n";
  for (const auto& row : speech["most_changed"]) {
    if (top-- == 0) break;
    text += "  " + short_number(row["kl"]) + "  " + shortened(row["prompt"], 90) + "\n      A  " + tokens(row["a"]) +
            "\n      B  " + tokens(row["b"]) + "\n";
  }
  return text;
}

std::string diff_text(const ordered_json& document, size_t top) {
  std::string text;
  for (const char* side : {"a", "b"}) {
    const auto& source = document[side];
    text += std::string(side == std::string("a") ? "A  " : "B  ") + source["name"].get<std::string>() + "   " +
            source["kind"].get<std::string>() + ": " + source["summary"].get<std::string>() + "\n";
  }
  text += "\n" + facts_text(document["facts"]) + "\n" + weights_text(document["weights"], document["from"] == "a") +
          beside_text(document["beside"]);
  if (document.contains("prompts")) text += "\n" + speech_text(document["prompts"], top);
  return text;
}

int run_diff(const DiffArguments& options, const Common& common) {
  EditSource a = open_edit_source(options.a), b = open_edit_source(options.b);
  ordered_json document = {{"a", describe(a)}, {"b", describe(b)}};
  document["facts"] = describe(editors::compare_facts(a.pack.facts, b.pack.facts));
  const auto base = base_of(a, b, options);
  if (!options.prompts.empty()) {
    // Said by the sides as they are, before they are brought to one base.
    const bool needs_model = !a.is_model() || !b.is_model();
    if (needs_model && !base)
      refuse({"--prompts", "packs without their model", "--model BASE, the unedited model", ""});
    DiffArguments named = options;
    if (base) named.model.model = base->path().string();
    document["prompts"] = compare_speech(a, b, named, common);
  }
  document["from"] = relate(a, b, base.get()) ? "a" : "base";  // what the weights were moved from
  document["weights"] = ordered_json::array();
  for (const auto& weight : editors::compare_deltas(a.pack.deltas, b.pack.deltas, base.get()))
    document["weights"].push_back(describe(weight));
  document["beside"] = ordered_json::array();
  for (const auto& [kind, in_a, in_b, same] : editors::compare_runtime(a.pack.runtime, b.pack.runtime))
    document["beside"].push_back({{"kind", kind}, {"in_a", in_a}, {"in_b", in_b}, {"same", same}});
  common.print(document, common.json ? "" : diff_text(document, options.top));
  return 0;
}

}  // namespace

VerbRun setup_diff(Options& o) {
  auto& options = o.arguments<DiffArguments>();
  o.add("A", &options.a, "edit pack, run folder or model (folder with its edits, GGUF file, ORG/NAME)",
        {.type = "PATH", .required = true})
      .add("B", &options.b, "the same", {.type = "PATH", .required = true});
  add_model_options(o, options.model);
  o.at("--model").meaning =
      "the unedited model, for norms and for --prompts with packs; default: SmolLM2-135M where the packs fit it";
  o.group("Next tokens")
      .add("--prompts", &options.prompts,
           "prompts to ask both: one a line, or a JSON array; shows where the next token changed most",
           {.type = "FILE"})
      .add("--top", &options.top, "prompts shown", {.limits = kPositive, .needs = "--prompts"})
      .add("--tokens", &options.tokens, "tokens shown of each distribution",
           {.limits = kPositive, .needs = "--prompts"});
  o.footer =
      "Examples\n"
      "  emend diff runs/monday runs/tuesday --model DIR --prompts probes.txt\n"
      "  emend diff DIR anna.safetensors          the model before and after a pack\n"
      "  emend diff DIR EDITED                    two model folders, tensor by tensor";
  return [&options](Common& common) { return run_diff(options, common); };
}

}  // namespace emend::tools
