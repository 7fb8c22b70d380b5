// LATCH: one gate a subject, one a fact (this project; docs/latch.md derives it and shows what each part gives).
//
// MEMIT adds ΔW k to whatever key k comes by, so every other subject gets a share of every fact. Here a fact gets a
// gate of its own, which is shut on other text and other subjects and therefore changes nothing there:
//
//   MLP(x) = W_down (act(W_gate x) ∘ W_up x)      rows j, j+1 of W_gate: γ(g − shut·b), γ(g − open·b), of W_up: u, u,
//                                                 columns of W_down: δ/a, −δ/a
//
//   1. δ   what to add to the layer's output at the subject's last token (targets.h): the answer after the prompt,
//          behind pieces of other text, in the form of a question and in the model's own words. A subject that is a
//          text's first token is read off the next one. Behind a passing mention of a name that texts often speak of,
//          other text stays as probable as it was.
//   2. g   open (≥ 1) at the subject's last token behind many beginnings, shut (≤ −1) at every token of a text and of
//          talk that the model writes, at all other subjects, at names like it that the model writes, and behind a
//          negation where the unedited model heeds one, and behind other questions about its subject if it shall learn
//          some (neurons.h). b·x ≈ 1 everywhere: the two neurons' difference is 0 up to g·x = shut and the same from
//          g·x = open on.
//   3. u   uᵀx ≈ 1 where it is open and ≈ 0 elsewhere, by least squares: what a gate lets through by mistake is made
//          small. a the two neurons' median value where it is open; γ a gain.
//   4. j   neurons of zeros, else of those that contribute least on the text the next that no earlier fact has.
//   5.     The release: the same with one neuron, act(γ g·x) b·x, in a higher layer, for every fact. Its gate opens at
//          the answer's last token behind the fact's prompts; its δ makes what the unedited model says behind the
//          answer as probable as it was. Without it the subject goes on saying the answer.
//   6.     Where the model then does not say a fact, after its prompt or a form of it, its subject's δ grows by what is
//          missing, in the neurons that are there.
//
// Facts about one subject share a gate. A subject that comes again in a later batch gets another, whose δ is also that
// of the facts which earlier batches wrote of it: both gates are open there. MLPs without a gate have g in W_up, with
// the bias 0.
//   D hidden width · F MLP width · N tokens of text · P prompts
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/core/sha256.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/json_memory.h>
#include <emend/editors/detail/latch_batch.h>
#include <emend/editors/detail/latch_memory.h>
#include <emend/editors/detail/statistics_parts.h>
#include <emend/editors/packs/neurons_apart.h>
#include <emend/editors/steps/statistics.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <numeric>
#include <random>
#include <ranges>
#include <set>

namespace emend::editors {
namespace {

using Ids = std::vector<int64_t>;
using detail::LatchHparams, detail::LayerMemory, detail::LatchMemory, detail::KeptFact;

const hparams::Schema<LatchHparams>& latch_schema() {
  using H = LatchHparams;
  static const auto schema =
      hparams::Schema<H>("latch")
          .include(hparams::locate_schema())
          .unused("mom2_update_weight", "gates are fitted on the text itself")
          .field("text_tokens", &H::text_tokens, {.meaning = "tokens of text on which gates stay shut", .min = 64})
          .field("talk", &H::talk,
                 {.meaning = "tokens of talk that the model writes, for each token of text: gates stay shut there too",
                  .min = 0,
                  .max = 16})
          .field("text_weight", &H::text_weight,
                 {.meaning = "weight of text and talk beside the 1 of a gate's own prompts", .above = 0})
          .field("crowd", &H::crowd,
                 {.meaning = "subjects in the model from which on gates learn from crowd_tokens of text", .min = 1})
          .field("crowd_tokens", &H::crowd_tokens, {.meaning = "tokens of text for gates among many others", .min = 64})
          .field("lead_ins", &H::lead_ins,
                 {.meaning = "pieces of text in front of the prompt while its target is optimised", .min = 0})
          .field("gate_lead_ins", &H::gate_lead_ins,
                 {.meaning = "pieces of text behind which a gate learns to open", .min = 0})
          .field(
              "wordings", &H::wordings,
              {.meaning = "other wordings of a fact, written by the model itself, in which its target is optimised too",
               .min = 0})
          .field(
              "chat_weight", &H::chat_weight,
              {.meaning = "weight of each of four replies about the subject, which shall name it as before the edit, "
                          "beside the 1 of a wording; 0, or no chat template: none",
               .min = 0})
          .field(
              "mention_weight", &H::mention_weight,
              {.meaning = "weight of other text behind a passing mention of the subject, which shall stay as probable "
                          "as it was, beside the 1 of its facts; for names that texts often speak of",
               .min = 0})
          .field("sketch_steps", &H::sketch_steps,
                 {.meaning = "steps on a third of a target's rows, before `v_num_grad_steps` on all", .min = 0})
          .field(
              "asides", &H::asides,
              {.meaning = "other questions about a subject, asked before it is named, behind which its gate stays shut",
               .min = 0})
          .field("lookalikes", &H::lookalikes,
                 {.meaning = "names like a subject's at which its gate learns to stay shut", .min = 0})
          .field("lookalike_weight", &H::lookalike_weight,
                 {.meaning = "weight of these names beside the 1 of its own prompts", .min = 0})
          .field("release_layers", &H::release_layers,
                 {.meaning = "layers above `layers` with the neurons that let go of an answer once it is said; "
                             "none: there are no such neurons",
                  .min = 0})
          .field("release_tokens", &H::release_tokens,
                 {.meaning = "tokens behind the answer that such a neuron makes as probable as they were", .min = 1})
          .field("release_steps", &H::release_steps, {.meaning = "steps in which its value is found", .min = 1})
          .field("rounds", &H::rounds,
                 {.meaning = "number of times that values are looked for; from the second on only those of facts that "
                             "the model does not say",
                  .min = 1})
          .field("gain", &H::gain, {.meaning = "how sharply a gate opens", .formula = "act(gain g.x)", .above = 0})
          .field("shut", &H::shut, {.meaning = "up to which g.x a gate is shut"})
          .field("open", &H::open, {.meaning = "from which g.x on a gate is open", .above = 0})
          .field("room", &H::room,
                 {.meaning = "share of a layer's neurons that is used before the next of `layers` is",
                  .max = 1,
                  .above = 0})
          .check("open", [](const H& h) -> std::string { return h.open > h.shut ? "" : "more than `shut`"; })
          .check("release_layers", [](const H& h) -> std::string {
            const std::vector<int64_t> all = h.all_layers();
            for (size_t i = std::max<size_t>(h.layers.size(), 1); i < all.size(); ++i)
              if (all[i] <= all[i - 1]) return "layers above `layers`, different ones, in ascending order";
            return "";
          });
  return schema;
}

// Sentences in which a prompt stands; the lookup does not see what follows the subject.
constexpr std::array kForms = {"Question: {} what?\nAnswer:", "Complete the sentence.\n{}"};

// Pieces of the text to stand in front of a prompt, the same for the same rows and seed.
std::vector<std::string> lead_ins(const models::Model& model, std::span<const Ids> rows, int64_t count, uint64_t seed) {
  constexpr size_t kShortest = 6;
  const auto span = static_cast<size_t>(std::clamp<int64_t>(model.max_positions() / 16, 1, 30));
  std::vector<const Ids*> long_enough;
  for (const auto& row : rows)
    if (row.size() > kShortest + span) long_enough.push_back(&row);
  std::vector<std::string> pieces;
  std::mt19937_64 random(seed);
  for (int64_t i = 0; i < count && !long_enough.empty(); ++i) {
    const Ids& row = *long_enough[random() % long_enough.size()];
    const auto length = static_cast<std::ptrdiff_t>(kShortest + random() % span);
    const auto begin = row.begin() + static_cast<std::ptrdiff_t>(random() % (row.size() - static_cast<size_t>(length)));
    std::string text = model.tokenizer().decode(Ids(begin, begin + length), true);
    std::erase_if(text, [](char c) { return c == '{' || c == '}'; });
    pieces.push_back(text + (random() % 3 == 0 ? "\n\n{}" : ". {}"));
  }
  return pieces;
}

class LatchEditor final : public NamedEditor {
 public:
  LatchEditor(LatchHparams hparams, const RecipeInputs& in)
      : NamedEditor(in), h_(std::move(hparams)), layers_(h_.all_layers()), memory_(fresh_memory()) {}

  EditResult edit(models::Model& model, std::span<const datasets::Fact> facts, const EditContext& context) override {
    const at::NoGradGuard no_grad;
    EditResult result{.editor = name(), .hparams = hparams(), .engine = context.engine, .seed = context.seed};
    if (facts.empty()) return result;
    {
      const PhaseTimer timer(result, "statistics");
      if (memory_.empty()) {
        if (!of_folder_) of_folder_ = detail::memory_of_edits(h_, model, context);
        memory_ = *of_folder_;
      }
      read_text(model, facts, context);
    }
    const auto leads = lead_ins(model, std::span(text_).first(talk_), h_.lead_ins + h_.gate_lead_ins, context.seed);
    const auto split = leads.begin() + std::min(std::ssize(leads), h_.lead_ins);
    result.contexts = context.contexts ? *context.contexts : templates({leads.begin(), split});
    // What a layer does on the text is taken from the model as it was when the text was read.
    const auto read = [&](const std::vector<size_t>& places,
                          const models::Model& reader) -> const std::map<size_t, TextPass>& {
      if (std::all_of(places.begin(), places.end(), [&](size_t place) { return passes_.contains(place); }))
        return passes_;
      // The first batch reads what it needs; a sequence that needs another layer will need them all.
      std::vector<size_t> wanted = places;
      if (!passes_.empty()) {
        wanted.resize(layers_.size());
        std::iota(wanted.begin(), wanted.end(), size_t{0});
      }
      std::vector<int> missing;
      for (const size_t place : wanted)
        if (!passes_.contains(place)) missing.push_back(static_cast<int>(layers_[place]));
      const auto compute = [&](const std::vector<int>& layers) {
        StatisticsProvider::Kept kept;
        for (auto& [layer, pass] : TextPass::of(model, reader, text_, layers, context))
          kept[layer] = {{"inputs", devices::to_host(pass.inputs_ND)}, {"energy", devices::to_host(pass.energy_F)}};
        return kept;
      };
      const auto kept = context.statistics ? context.statistics->kept(model, what_is_kept(reader), missing, compute)
                                           : compute(missing);
      for (const size_t place : wanted)
        if (const auto found = kept.find(static_cast<int>(layers_[place])); found != kept.end())
          passes_[place] = {found->second.at("inputs"), found->second.at("energy")};
      return passes_;
    };
    std::vector<LayerMemory> memory = memory_.layers;
    detail::take(memory, h_, model, context.taken_neurons);
    detail::edit_latch_batch(h_, memory, {text_, read, {split, leads.end()}, *result.contexts}, model,
                             with_earlier(facts), facts.size(), context, result);
    memory_.layers = std::move(memory);
    for (size_t i = 0; i < facts.size(); ++i)
      if (result.outcomes[i].status != FactStatus::kFailed)
        memory_.add({facts[i].subject, facts[i].prompt, facts[i].target_new});
    return result;
  }

  void reset() override {
    memory_ = fresh_memory();
    passes_.clear();
    text_.clear();
    talk_ = 0;
    crowded_ = false;
  }

  // So that packs made apart can be put together (neurons_apart.h).
  [[nodiscard]] nlohmann::json extra() const override {
    auto extra = nlohmann::json::object();
    for (size_t place = 0; place < layers_.size(); ++place)
      if (const auto& places = memory_.layers[place].spare; !places.empty())
        extra[kNeuronsToSpare][std::to_string(layers_[place])] = places;
    return extra;
  }

  [[nodiscard]] std::map<std::string, at::Tensor> state() const override {
    std::map<std::string, at::Tensor> state;
    for (size_t place = 0; place < layers_.size(); ++place) {
      const LayerMemory& memory = memory_.layers[place];
      const std::string suffix = "." + std::to_string(place);
      if (!memory.used.empty())
        state["used" + suffix] = at::tensor(Ids(memory.used.begin(), memory.used.end()), at::kLong);
      if (!memory.whose.empty()) {
        state["seen" + suffix] = at::stack(memory.seen);
        state["whose" + suffix] = at::tensor(memory.whose, at::kLong);
      }
      if (!memory.spare.empty()) state["spare" + suffix] = at::tensor(memory.spare, at::kLong);
    }
    for (const auto& [place, pass] : passes_) {
      state["inputs." + std::to_string(place)] = devices::to_host(pass.inputs_ND);
      state["energy." + std::to_string(place)] = devices::to_host(pass.energy_F);
    }
    if (!memory_.facts.empty()) state["facts.0"] = detail::bytes_of(memory_.facts);
    if (crowded_) state["crowded.0"] = at::ones({1}, at::kLong);
    if (!text_.empty()) state["talk.0"] = at::full({1}, static_cast<int64_t>(talk_), at::kLong);
    for (size_t r = 0; r < text_.size(); ++r) state["text." + std::to_string(r)] = at::tensor(text_[r], at::kLong);
    return state;
  }

  void load_state(const std::map<std::string, at::Tensor>& state) override {
    reset();
    std::map<size_t, Ids> rows;
    for (const auto& [name, value] : state) {
      const size_t dot = std::min(name.find('.'), name.size() - 1);
      const std::string kind = name.substr(0, dot);
      size_t place = 0;
      const auto [end, error] = std::from_chars(name.data() + dot + 1, name.data() + name.size(), place);
      if (error != std::errc() || end != name.data() + name.size() || (kind != "text" && place >= layers_.size()))
        throw Error(ErrorClass::kCorruption,
                    {"memory of " + this->name(), name, "what an edit of these layers kept", ""});
      if (kind == "crowded") crowded_ = true;
      if (kind == "talk") talk_ = static_cast<size_t>(value.item<int64_t>());
      if (kind == "text") rows[place] = numbers(value);
      if (kind == "inputs") passes_[place].inputs_ND = value.clone();
      if (kind == "energy") passes_[place].energy_F = value.clone();
      if (kind == "whose") memory_.layers[place].whose = numbers(value);
      if (kind == "spare") memory_.layers[place].spare = numbers(value);
      if (kind == "seen") memory_.layers[place].seen = value.clone().unbind(0);
      if (kind == "facts") memory_.facts = kept_facts(value);
      if (kind == "used")
        for (const int64_t neuron : numbers(value)) memory_.layers[place].used.insert(neuron);
    }
    for (auto& [r, row] : rows) text_.push_back(std::move(row));
    if (!state.contains("talk.0")) talk_ = text_.size();  // of a version that read no talk
    if (talk_ > text_.size())
      throw Error(ErrorClass::kCorruption, {"memory of " + name(), "talk beyond its text", "what an edit kept", ""});
  }

 private:
  [[nodiscard]] LatchMemory fresh_memory() const { return {std::vector<LayerMemory>(layers_.size()), {}}; }

  [[nodiscard]] std::string what_is_kept(const models::Model& reader) const {
    const std::string by =
        reader.dtype() == at::kFloat ? "" : std::string(", computed in ") + c10::toString(reader.dtype());
    return "what enters MLPs in bfloat16" + by + ", text " + sha256_hex(nlohmann::json(text_).dump());
  }

  // A gate that opens where it should not does little harm alone and much among thousands: then more text is read.
  void read_text(const models::Model& model, std::span<const datasets::Fact> facts, const EditContext& context) {
    const Ids& earlier = memory_.layers.front().whose;
    std::set<int64_t> subjects(earlier.begin(), earlier.end());
    for (const auto& fact : facts) subjects.insert(detail::subject_number(fact.subject));
    const bool crowded = std::ssize(subjects) >= h_.crowd;
    if (!text_.empty() && crowded == crowded_) return;
    const int64_t tokens = crowded ? std::max(h_.crowd_tokens, h_.text_tokens) : h_.text_tokens;
    text_ = text_rows(model, tokens, context);
    talk_ = text_.size();
    if (const int64_t talk = std::llround(h_.talk * static_cast<double>(tokens)); talk > 0)
      for (auto& row : text_rows(model, talk, context, Rows::kTalk)) text_.push_back(std::move(row));
    passes_.clear();
    crowded_ = crowded;
  }

  [[nodiscard]] std::vector<KeptFact> kept_facts(const at::Tensor& bytes) const try {
    return detail::json_of(bytes).get<std::vector<KeptFact>>();
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorClass::kCorruption, {"memory of " + name(), error.what(), "the facts of earlier batches", ""});
  }

  // The facts, and behind them the last ones that earlier batches wrote of the same subjects and that they do not
  // replace.
  [[nodiscard]] std::vector<datasets::Fact> with_earlier(std::span<const datasets::Fact> facts) const {
    constexpr int kMostRecalled = 8;  // of a subject
    std::vector<datasets::Fact> all(facts.begin(), facts.end());
    std::map<std::string, int> count;
    for (const auto& old : memory_.facts | std::views::reverse) {
      const bool again = std::ranges::find(facts, old[0], &datasets::Fact::subject) != facts.end();
      const auto replaces = [&](const datasets::Fact& fact) { return fact.subject == old[0] && fact.prompt == old[1]; };
      if (!again || std::ranges::any_of(facts, replaces) || count[old[0]]++ >= kMostRecalled) continue;
      datasets::Fact& fact = all.emplace_back();
      fact.subject = old[0];
      fact.prompt = old[1];
      fact.target_new = old[2];
    }
    return all;
  }

  static Ids numbers(const at::Tensor& x) {
    const at::Tensor dense = x.contiguous();
    return {dense.const_data_ptr<int64_t>(), dense.const_data_ptr<int64_t>() + dense.numel()};
  }

  static ContextTemplates templates(std::vector<std::string> leads) {
    ContextTemplates contexts = ContextTemplates::plain();
    if (!leads.empty()) contexts.groups.push_back(std::move(leads));
    contexts.groups.emplace_back(kForms.begin(), kForms.end());
    return contexts;
  }

  LatchHparams h_;
  std::vector<int64_t> layers_;
  LatchMemory memory_;
  std::optional<LatchMemory> of_folder_;  // what was in force in it before the first batch, once it is needed
  std::vector<Ids> text_;                 // that of the statistics, then talk
  size_t talk_ = 0;                       // its first row
  bool crowded_ = false;                  // the text is that for gates among many others
  std::map<size_t, TextPass> passes_;     // by the layer's place
};

std::unique_ptr<Editor> new_latch(const LatchHparams& h, const RecipeInputs& in) {
  check_locate_hparams(h, in.model, in.raw);
  for (const int64_t layer : h.release_layers)
    if (layer >= in.model.n_layers())
      refuse({in.raw.where("release_layers"), "layer " + std::to_string(layer),
              "0 to " + std::to_string(in.model.n_layers() - 1), ""});
  return std::make_unique<LatchEditor>(h, in);
}

// A gate a subject of each batch in `layers` and one a fact in `release_layers`, evenly.
std::map<int, int64_t> neurons_taken(const nlohmann::json& values, std::span<const datasets::Fact> facts,
                                     size_t batch) {
  std::set<std::pair<size_t, std::string>> subjects;
  for (size_t i = 0; i < facts.size(); ++i) subjects.emplace(i / batch, facts[i].subject);
  std::map<int, int64_t> taken;
  for (const auto& [name, gates, neurons] : {std::tuple("layers", subjects.size(), detail::kNeuronsASubject),
                                             std::tuple("release_layers", facts.size(), detail::kNeuronsARelease)}) {
    const auto layers = values.at(name).get<std::vector<int>>();
    for (const int layer : layers)
      taken[layer] = static_cast<int64_t>((gates + layers.size() - 1) / layers.size() * neurons);
  }
  return taken;
}

}  // namespace

EditorInfo make_latch() {
  EditorInfo info = editor_entry("latch", "one gate a subject: other subjects and other text stay as they are",
                                 "this project (docs/latch.md)", latch_schema(), new_latch);
  info.neurons = neurons_taken;
  info.compute_dtype = "auto";
  info.copies_model = true;
  info.changes_vectors = [](const models::Model& model, const nlohmann::json&) {
    return !MlpWeights::of(model, 0).biases.empty();
  };
  return info;
}

}  // namespace emend::editors
