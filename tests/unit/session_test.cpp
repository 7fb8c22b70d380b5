// Session: what a program that embeds the library uses. Progress, cancel, undo, guard, packs, and editors of its own.
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/apply.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/placing.h>
#include <emend/workflow/card.h>
#include <emend/workflow/preflight.h>
#include <emend/workflow/session.h>
#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "support/editor_models.h"

namespace emend::workflow {
namespace session_test {

using testing::all_weights;
using testing::changed_weights;
using testing::tiny_contexts;
using testing::tiny_facts;

// Few steps, for a model of four layers.
std::vector<std::string> settings(const std::string& editor) {
  if (editor == "lora") return {"layers=[1,2]", "num_steps=3"};
  if (editor == "ft") return {"layers=[1]", "num_steps=3"};
  return {editor == "rome" ? "layers=[1]" : "layers=[1,2]", "v_loss_layer=3", "v_num_grad_steps=4", "v_lr=0.5"};
}

RunOptions options_for(const std::string& editor) {
  RunOptions options;
  options.editor = editor;
  options.hparams = editor == "lora" ? "smollm2-135m" : editor == "ft" ? "gpt2-xl" : "gpt2-xl";
  options.set = settings(editor);
  options.templates =
      editor == "rome" ? editors::ContextTemplates{{{"{}", "So it is. {}"}}, false, 0} : tiny_contexts();
  return options;
}

// A tiny model with statistics, as it was before any edit, and facts.
class TinySession : public ::testing::Test {
 protected:
  models::Model model = testing::tiny_model();
  editors::FixedStatistics statistics = testing::tiny_statistics(model);
  const std::map<std::string, at::Tensor> before = all_weights(model);
  const std::vector<datasets::Fact> facts = tiny_facts();
};

class SessionTest : public TinySession, public ::testing::WithParamInterface<const char*> {};

TEST(SessionPack, SaysWithWhichEngineAndContextsItWasMade) {
  auto options = options_for("memit");
  options.templates->sampled = true;
  options.templates->seed = 7;
  for (const char* engine : {"fast", "reference"}) {
    auto model = testing::tiny_model();
    auto statistics = testing::tiny_statistics(model);
    options.engine = engine;
    Session session(model, options, {.statistics = &statistics});
    (void)session.edit(tiny_facts());
    const auto extra = session.pack().extra;
    EXPECT_EQ(extra["engine"], engine);
    EXPECT_EQ(extra["contexts"]["sampled"], true);
    EXPECT_EQ(extra["contexts"]["seed"], 7);
  }
}

TEST_P(SessionTest, TheCallbackStopsBetweenStepsAndLeavesTheWeightsUntouched) {
  // How many calls a whole edit makes, and what it gives.
  int calls = 0;
  const auto options = options_for(GetParam());
  Handles lent{.progress = [&](const ProgressUpdate&) { ++calls; }, .statistics = &statistics};
  {
    Session session(model, options, lent);
    (void)session.edit(tiny_facts());
    session.undo();
  }
  ASSERT_GE(calls, 2) << "an edit that reports nothing cannot be stopped";
  ASSERT_TRUE(changed_weights(model, before).empty());

  for (int stop : {1, (calls + 1) / 2, calls}) {
    int count = 0;
    lent.progress = stopping([&](const ProgressUpdate&) { return ++count != stop; });
    Session session(model, options, lent);
    try {
      (void)session.edit(tiny_facts());
      FAIL() << "not stopped at call " << stop << " of " << calls;
    } catch (const Error& error) {
      EXPECT_EQ(error.error_class(), ErrorClass::kCancelled);
    }
    EXPECT_EQ(count, stop) << "it went on after the callback had said no";
    EXPECT_TRUE(changed_weights(model, before).empty()) << "stopped at call " << stop;
    EXPECT_TRUE(session.results().empty());
    // The same session goes on.
    EXPECT_EQ(session.edit(tiny_facts()).outcomes.size(), tiny_facts().size());
    EXPECT_FALSE(changed_weights(model, before).empty());
    session.undo();
    EXPECT_TRUE(changed_weights(model, before).empty());
  }
}

INSTANTIATE_TEST_SUITE_P(Editors, SessionTest, ::testing::Values("memit", "rome", "ft", "lora"),
                         [](const auto& info) { return std::string(info.param); });

TEST_F(TinySession, ATokenStopsItFromOutside) {
  const Handles lent{.statistics = &statistics};
  Session session(model, options_for("memit"), lent);
  lent.cancel.request();
  EXPECT_THROW((void)session.edit(tiny_facts()), Error);
  EXPECT_TRUE(changed_weights(model, before).empty());
}

TEST_F(TinySession, PacksHoldAllBatchesAndGiveTheSameModel) {
  const testing::TemporaryFolder folder("session");
  {
    Session session(model, options_for("memit"), {.statistics = &statistics});
    (void)session.edit(std::span(facts).first(2));
    (void)session.edit(std::span(facts).subspan(2));
    session.finish();
    EXPECT_EQ(session.failed(), 0);
    EXPECT_EQ(session.pack().facts.size(), facts.size());
    const auto pack = folder.path() / "edit.safetensors", facts_file = folder.path() / "facts.jsonl";
    session.save_pack(pack);
    session.save("pack", pack);  // again
    write_file(facts_file, "{}");
    for (const char* form : {"pack", "gguf", "lora", "model", "peft"})
      EXPECT_THROW(session.save(form, facts_file), Error) << form;
    EXPECT_THROW(session.save("gguf", pack), Error);
    EXPECT_THROW(session.save("peft", folder.path()), Error) << "a folder of other things";
    EXPECT_EQ(read_file(facts_file), "{}");
  }
  EXPECT_FALSE(changed_weights(model, before).empty()) << "the end of a session takes nothing back";
  auto other = testing::tiny_model();
  editors::apply_pack(other, editors::load_pack(folder.path() / "edit.safetensors"))->commit();
  for (const auto& [name, weight] : all_weights(model))
    EXPECT_TRUE(at::allclose(weight, other.weight(name), 1e-5, 1e-6)) << name;
}

// What an older model had and the new one lacks would act in the new one.
TEST(Session, AnOlderModelGoesWithAllThatBelongsToIt) {
  const testing::TemporaryFolder folder("session_older");
  testing::write_tiny_model(folder / "model");
  auto model = models::load_model((folder / "model").string());
  auto statistics = testing::tiny_statistics(model);
  const auto facts = tiny_facts();
  Session session(model, options_for("memit"), {.statistics = &statistics});
  (void)session.edit(std::span(facts).first(1));
  const auto older = folder / "older";
  const std::vector<std::string> gone = {"chat_template.jinja", "generation_config.json", "vocab.json",
                                         "additional_chat_templates/tool_use.jinja"};
  std::filesystem::create_directories(older / "additional_chat_templates");
  for (const auto& name : gone) write_file(older / name, "{}");
  for (const char* name : {"config.json", "notes.txt"}) write_file(older / name, "{}");
  write_file(older / "README.md", model_card("older", {}, "model"));
  session.save("model", older);
  for (const auto& name : gone) EXPECT_FALSE(std::filesystem::exists(older / name)) << name;
  EXPECT_FALSE(std::filesystem::exists(older / "README.md")) << "a card of what was replaced";
  EXPECT_EQ(read_file(older / "notes.txt"), "{}");
  EXPECT_THROW(session.save("pack", older / "model.safetensors"), Error) << "weights are no pack";
  write_file(older / "README.md", "of the user's own");
  session.save("model", older);
  EXPECT_EQ(read_file(older / "README.md"), "of the user's own");
}

TEST(Session, AdaptersOfEditsThatChangeBiasesAreRefusedBeforeTheWork) {
  const auto with_biases = testing::tiny_model({.family = "gpt2"}), without = testing::tiny_model();
  const auto refused = [](const char* form, const models::Model& model, const editors::EditorInfo& info,
                          const std::string& more = "") {
    const auto values = info.changes_vectors
                            ? info.effective(hparams::parse_hparams("layers: [1]\n" + more, "test.yaml"), {})
                            : nlohmann::json();
    try {
      check_adapter(save_format(form), model, info.name, values);
    } catch (const Error& error) {
      return error.error_class() == ErrorClass::kUnsupported;
    }
    return false;
  };
  for (const char* form : {"peft", "lora"})
    for (const auto& info : editors::all_editors()) {
      if (!info.changes_weights) continue;
      const bool takes = info.name == "latch" || info.name.starts_with("ft");
      EXPECT_EQ(refused(form, with_biases, info), takes) << info.name;
      EXPECT_FALSE(refused(form, without, info)) << info.name;
    }
  // Biases and norms of the module that a file names, though MLPs have none.
  const auto& ft = editors::find_editor("ft");
  EXPECT_FALSE(refused("peft", without, ft, "rewrite_module_tmp: \"model.layers.{}.self_attn\"\n"));
  EXPECT_TRUE(refused("peft", without, ft, "rewrite_module_tmp: \"model.layers.{}\"\n")) << "with the norms";
  const auto qwen = testing::flavour_model({"qwen2", ""}, 5);
  EXPECT_FALSE(refused("peft", qwen, ft));
  EXPECT_TRUE(refused("peft", qwen, ft, "rewrite_module_tmp: \"model.layers.{}.self_attn.q_proj\"\n"));
}

// What such a model lacks is told where the editor is made, not as advice about room that nobody asked for.
TEST(Session, ExpertsGetNoRoomOfThemselves) {
  RunOptions options;
  options.editor = "latch";
  options.hparams = "smollm2-135m";
  options.set = {"layers=[1]", "release_layers=[]"};
  options.save = {"model"};
  const auto dense = testing::tiny_model(), experts = testing::flavour_model({"mixtral", ""}, 5);
  EXPECT_GT(room_to_add(options, dense.checkpoint(), tiny_facts()), 0);
  EXPECT_EQ(room_to_add(options, experts.checkpoint(), tiny_facts()), 0);
}

TEST_F(TinySession, UndoTakesOutItsOwnEditsAlone) {
  auto other = testing::tiny_model();
  Session first(model, options_for("memit"), {.statistics = &statistics});
  Session second(model, options_for("memit"), {.statistics = &statistics});
  (void)first.edit(std::span(facts).first(1));
  (void)second.edit(std::span(facts).subspan(1, 1));
  (void)first.edit(std::span(facts).subspan(2));
  editors::EditTransaction expected(other);
  for (const auto& delta : second.deltas()) (void)editors::apply_delta(delta, expected);
  first.undo();
  EXPECT_TRUE(changed_weights(model, all_weights(other)).empty()) << "what the second wrote, on the model's own bytes";
  first.undo();
  EXPECT_TRUE(changed_weights(model, all_weights(other)).empty());
  (void)first.edit(std::span(facts).first(1));
  second.undo();
  EXPECT_FALSE(changed_weights(model, before).empty());
  first.undo();
  EXPECT_TRUE(changed_weights(model, before).empty());
}

// What is thrown behind the editor's back (by who judges, or in the guard's pass) leaves neither weights nor memory.
TEST_F(TinySession, WhatIsThrownBehindAnEditTakesItBack) {
  auto other = testing::tiny_model();
  Session session(model, options_for("memit-seq"), {.statistics = &statistics});
  EXPECT_THROW((void)session.edit(std::span(facts).first(1), [] { throw std::runtime_error("judge"); }),
               std::runtime_error);
  EXPECT_TRUE(changed_weights(model, before).empty());
  {
    hooks::HookSession hook(model.hooks());
    hook.edit({hooks::Site::kFinalNorm}, [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("guard"); });
    hook.attach();
    EXPECT_ANY_THROW((void)session.edit(std::span(facts).first(1)));
  }
  EXPECT_TRUE(changed_weights(model, before).empty());
  EXPECT_TRUE(session.editor().state().empty()) << "of batches that were taken back";
  EXPECT_TRUE(session.readings().empty());
  (void)session.edit(std::span(facts).subspan(1));
  Session fresh(other, options_for("memit-seq"), {.statistics = &statistics});
  (void)fresh.edit(std::span(facts).subspan(1));
  EXPECT_TRUE(changed_weights(model, all_weights(other)).empty());
}

TEST_F(TinySession, ABatchThatWasTakenBackIsNotSaved) {
  Session session(model, options_for("memit"), {.statistics = &statistics});
  (void)session.edit(std::span(facts).first(1));
  const auto edited = all_weights(model);
  const auto deltas = session.deltas().size();
  bool judged = false;
  (void)session.edit(std::span(facts).subspan(1), [&] {
    judged = true;
    EXPECT_FALSE(changed_weights(model, edited).empty());
  });
  EXPECT_TRUE(judged);
  EXPECT_TRUE(changed_weights(model, edited).empty());
  EXPECT_EQ(session.results().size(), 2U);
  EXPECT_EQ(session.deltas().size(), deltas);
  EXPECT_EQ(session.pack().facts.size(), 1U);
  session.undo();
  EXPECT_TRUE(session.readings().empty());
  EXPECT_THROW(session.resume({}, facts, {}), Error) << "facts of no batch";
}

TEST_F(TinySession, ItsOwnPackIsNotPutOnTopOfIt) {
  Changes other(model);
  std::optional<Session> session(std::in_place, model, options_for("memit"), Handles{.statistics = &statistics});
  const auto twice = [&](const editors::EditPack& pack) {
    try {
      other.put_in(pack, {}, "pack");
      return false;
    } catch (const Error& error) {
      return std::string(error.what()).find("is already in force") != std::string::npos;
    }
  };
  (void)session->edit(std::span(facts).first(1));
  const auto pack = session->pack();
  EXPECT_TRUE(twice(pack));
  (void)session->edit(std::span(facts).subspan(1));
  EXPECT_TRUE(twice(pack)) << "it is a part of the change";
  session->undo();
  EXPECT_FALSE(twice(pack)) << "nothing of it is in force";
  other.take_out();
  (void)session->edit(std::span(facts).first(1));
  const auto kept = session->pack();
  session.reset();
  EXPECT_TRUE(twice(kept)) << "changes stay when their session ends";
}

TEST(Session, SaysWhatIsWrongWithTheRequest) {
  auto model = testing::tiny_model();
  const auto message = [&](RunOptions options) -> std::string {
    try {
      Session session(model, std::move(options));
      (void)session.edit({});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message({.editor = "memmit"}).find("did you mean \"memit\""), std::string::npos);
  EXPECT_NE(message({}).find("no preset of memit fits this model"), std::string::npos) << message({});
  EXPECT_NE(message({.hparams = "gpt2-xl"}).find("layer"), std::string::npos) << message({.hparams = "gpt2-xl"});
  EXPECT_THROW(Session(model, std::unique_ptr<editors::Editor>()), Error);
}

// An editor of a program's own: takes a share of a weight away.
class Fading final : public editors::Editor {
 public:
  explicit Fading(double share) : share_(share) {}
  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] nlohmann::json hparams() const override { return {{"share", share_}}; }
  [[nodiscard]] editors::EditResult edit(models::Model& model, std::span<const datasets::Fact> facts,
                                         const editors::EditContext& context) override {
    editors::EditTransaction scope(model, context.transaction);
    const auto site = model.edit_site(0);
    editors::EditResult result;
    result.editor = name_;
    result.hparams = hparams();
    result.deltas.push_back(
        editors::WeightDelta::as_stored(site.weight_name, 0, model.weight(site.weight_name).to(at::kDouble) * -share_));
    editors::apply_delta(result.deltas.back(), scope);
    result.outcomes.resize(facts.size());
    scope.commit();
    return result;
  }

 private:
  std::string name_ = "fading";
  double share_;
};

struct FadingHparams {
  double share = 0.5;
};

editors::EditorInfo fading() {
  static const auto schema = hparams::Schema<FadingHparams>("fading").field(
      "share", &FadingHparams::share, {.meaning = "what is taken away", .max = 1, .above = 0});
  return editors::editor_entry(
      "fading", "takes a share of a weight away", "none", schema,
      [](const FadingHparams& h, const editors::RecipeInputs&) { return std::make_unique<Fading>(h.share); });
}

TEST(Session, RunsAnEditorOfTheProgramsOwn) {
  editors::register_editor(fading());
  EXPECT_EQ(editors::find_editor("Fading").name, "fading");
  EXPECT_THROW(editors::register_editor(fading()), Error) << "a name twice";
  EXPECT_THROW(editors::register_editor({}), Error) << "without a name";

  auto model = testing::tiny_model();
  const auto before = all_weights(model);
  const testing::TemporaryFolder folder("session-own");
  write_file(folder.path() / "own.yaml", "share: 0.25\n");
  Session session(model, {.editor = "fading", .hparams = (folder.path() / "own.yaml").string()});
  (void)session.edit(tiny_facts());
  const auto name = model.edit_site(0).weight_name;
  EXPECT_EQ(changed_weights(model, before), std::vector<std::string>{name});
  EXPECT_TRUE(at::allclose(model.weight(name), before.at(name) * 0.75));
  session.undo();
  EXPECT_TRUE(changed_weights(model, before).empty());
}

// The guard takes back what it must, and a session after "revert" has an unedited model.
TEST_F(TinySession, TheGuardWatchesEveryBatch) {
  auto options = options_for("memit");
  options.guard.relative_update = 1e-12;
  {
    Session session(model, options, {.statistics = &statistics});
    (void)session.edit(facts);
    EXPECT_EQ(session.readings().size(), 1U);
    EXPECT_EQ(session.readings().front().alarms.size(), 1U);
    EXPECT_EQ(session.failed(), 0) << "it only warns";
    session.undo();
  }
  options.on_collapse = "stop";
  {
    Session session(model, options, {.statistics = &statistics});
    EXPECT_EQ(session.edit(std::span(facts).first(1)).failed(), 1);
    EXPECT_TRUE(session.stopped());
    EXPECT_NE(session.edit(std::span(facts).subspan(1)).outcomes.front().reason.find("had stopped"), std::string::npos);
    EXPECT_TRUE(changed_weights(model, before).empty());
  }
  options.on_collapse = "warn";
  options.guard.relative_update = 0;
  Session session(model, options, {.statistics = &statistics});
  (void)session.edit(std::span(facts).first(1));
  EXPECT_EQ(session.context().transaction, nullptr) << "a transaction that has ended";
  session.undo();
  EXPECT_TRUE(changed_weights(model, before).empty());
}

// A neuron of its own may be large: it is shut where nothing of its subject is said.
TEST(Session, TheGuardDoesNotWeighWholeNeurons) {
  auto model = testing::tiny_model();
  const testing::TemporaryFolder folder("session_neurons");
  write_file(folder / "latch.yaml", "layers: [1, 2]\ntext_tokens: 512\nv_num_grad_steps: 2\n");
  RunOptions options;
  options.editor = "latch";
  options.hparams = (folder / "latch.yaml").string();
  options.guard.relative_update = 1e-12;
  Session session(model, options);
  const auto& batch = session.edit(tiny_facts());
  EXPECT_GT(batch.layers.front().relative_update_norm, 1e-3);
  ASSERT_EQ(session.readings().size(), 1U);
  EXPECT_TRUE(session.readings().front().alarms.empty()) << session.readings().front().alarms.front();
}

// A copy that is made once serves all scopes that keep the weight from there on; exchanging gives both states back.
TEST(Transactions, ShareTheirCopies) {
  auto model = testing::tiny_model();
  const auto name = model.edit_site(0).weight_name;
  const at::Tensor original = model.weight(name).clone();
  editors::EditTransaction whole(model), batch(model, &whole), step(model, &batch);
  step.keep(name);
  EXPECT_TRUE(step.originals().at(name).is_same(batch.originals().at(name)));
  EXPECT_TRUE(step.originals().at(name).is_same(whole.originals().at(name)));
  const at::Tensor edited = original * 2;
  model.set_weight(name, edited);
  whole.swap();
  EXPECT_TRUE(at::equal(model.weight(name), original));
  whole.swap();
  EXPECT_TRUE(at::equal(model.weight(name), edited));
  step.commit();
  batch.commit();
  whole.restore();
  EXPECT_TRUE(at::equal(model.weight(name), original));
}

TEST(Placing, LoadsWithADeviceMap) {
  const testing::TemporaryFolder folder("placing");
  testing::write_tiny_model(folder.path());
  const auto model = models::load_placed(folder.path().string(), {.dtype = at::kBFloat16});
  EXPECT_EQ(model.dtype(), at::kBFloat16);
  EXPECT_EQ(model.placement().devices().size(), 1U);
  EXPECT_THROW((void)models::load_placed(folder.path().string(), {.device_map = "everywhere"}), Error);
  EXPECT_THROW((void)models::load_placed(folder.path().string(), {.max_memory = "cpu=1KiB"}), Error);
}

// The rules of docs/guide.md: each thread may edit a model of its own, and all may ask one that nobody edits.
TEST(SessionThreads, EditTheirOwnModelsAsOneThreadDoes) {
  const auto shared = testing::tiny_model();
  const auto ids = models::TokenBatch::from_rows({{5, 6, 7, 8}});
  const auto work = [&](models::Model& model, const char* editor) {
    auto statistics = testing::tiny_statistics(model);
    const auto before = all_weights(model);
    std::map<std::string, at::Tensor> result;
    for (int round = 0; round < 2; ++round) {
      Session session(model, options_for(editor), {.statistics = &statistics});
      (void)session.edit(tiny_facts());
      result = all_weights(model);
      result["logits"] = model.forward(ids).logits.detach();
      result["shared"] = shared.forward(ids).logits.detach();
      session.undo();
      EXPECT_TRUE(changed_weights(model, before).empty()) << editor;
    }
    return result;
  };
  const std::vector<const char*> editors = {"memit", "rome", "ft", "lora"};
  std::vector<models::Model> models;
  std::vector<std::map<std::string, at::Tensor>> alone, together(editors.size());
  for (const char* editor : editors) alone.push_back(work(models.emplace_back(testing::tiny_model()), editor));
  std::vector<std::thread> threads;
  for (size_t n = 0; n < editors.size(); ++n)
    threads.emplace_back([&, n] { together[n] = work(models[n], editors[n]); });
  for (auto& thread : threads) thread.join();
  for (size_t n = 0; n < editors.size(); ++n)
    for (const auto& [name, value] : alone[n])
      EXPECT_TRUE(at::equal(value, together[n].at(name))) << editors[n] << " " << name;
}

}  // namespace session_test
}  // namespace emend::workflow
