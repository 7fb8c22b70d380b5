// Session: what a program that embeds the library uses. Progress, cancel, undo, packs, and editors of its own.
#include <emend/core/error.h>
#include <emend/editors/apply.h>
#include <emend/editors/register.h>
#include <emend/editors/session.h>
#include <emend/models/placing.h>
#include <gtest/gtest.h>

#include <cmath>

#include "support/editor_models.h"

namespace emend::editors {
namespace {

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

SessionOptions options_for(const std::string& editor, StatisticsProvider& statistics) {
  SessionOptions options;
  options.hparams = editor == "lora" ? "smollm2-135m" : editor == "ft" ? "gpt2-xl" : "gpt2-xl";
  options.set = settings(editor);
  options.statistics = &statistics;
  options.contexts = editor == "rome" ? ContextTemplates{{{"{}", "So it is. {}"}}, false, 0} : tiny_contexts();
  return options;
}

class SessionTest : public ::testing::TestWithParam<const char*> {};

TEST_P(SessionTest, TheCallbackStopsBetweenStepsAndLeavesTheWeightsUntouched) {
  auto model = testing::tiny_model();
  auto statistics = testing::tiny_statistics(model);
  const auto before = all_weights(model);

  // How many calls a whole edit makes, and what it gives.
  int calls = 0;
  auto options = options_for(GetParam(), statistics);
  options.progress = [&](const ProgressUpdate&) { return ++calls, true; };
  {
    Session session(model, GetParam(), options);
    (void)session.edit(tiny_facts());
    session.undo();
  }
  ASSERT_GE(calls, 2) << "an edit that reports nothing cannot be stopped";
  ASSERT_TRUE(changed_weights(model, before).empty());

  for (int stop : {1, (calls + 1) / 2, calls}) {
    int count = 0;
    auto stopping = options_for(GetParam(), statistics);
    stopping.progress = [&](const ProgressUpdate&) { return ++count != stop; };
    Session session(model, GetParam(), stopping);
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

TEST(Session, ATokenStopsItFromOutside) {
  auto model = testing::tiny_model();
  auto statistics = testing::tiny_statistics(model);
  const auto before = all_weights(model);
  auto options = options_for("memit", statistics);
  Session session(model, "memit", options);
  options.cancel.request();
  EXPECT_THROW((void)session.edit(tiny_facts()), Error);
  EXPECT_TRUE(changed_weights(model, before).empty());
}

TEST(Session, PacksHoldAllBatchesAndGiveTheSameModel) {
  auto model = testing::tiny_model();
  auto statistics = testing::tiny_statistics(model);
  const auto before = all_weights(model);
  const testing::ScratchFolder folder("session");
  const auto facts = tiny_facts();
  {
    Session session(model, "memit", options_for("memit", statistics));
    (void)session.edit(std::span(facts).first(2));
    (void)session.edit(std::span(facts).subspan(2));
    session.finish();
    EXPECT_EQ(session.failed(), 0);
    EXPECT_EQ(session.pack().facts.size(), facts.size());
    session.save_pack(folder.path() / "edit.safetensors");
  }
  EXPECT_FALSE(changed_weights(model, before).empty()) << "the end of a session takes nothing back";
  auto other = testing::tiny_model();
  apply_pack(other, load_pack(folder.path() / "edit.safetensors"))->commit();
  for (const auto& [name, weight] : all_weights(model))
    EXPECT_TRUE(at::allclose(weight, other.weight(name), 1e-5, 1e-6)) << name;
}

TEST(Session, SaysWhatIsWrongWithTheRequest) {
  auto model = testing::tiny_model();
  const auto message = [&](std::string_view editor, SessionOptions options) -> std::string {
    try {
      Session session(model, editor, std::move(options));
      (void)session.edit({});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message("memmit", {}).find("did you mean \"memit\""), std::string::npos);
  EXPECT_NE(message("memit", {}).find("no preset of memit fits this model"), std::string::npos) << message("memit", {});
  EXPECT_NE(message("memit", {.hparams = "gpt2-xl"}).find("layer"), std::string::npos)
      << message("memit", {.hparams = "gpt2-xl"});
  EXPECT_THROW(Session(model, std::unique_ptr<Editor>()), Error);
}

// An editor of a program's own: takes a share of a weight away.
class Fading final : public Editor {
 public:
  explicit Fading(double share) : share_(share) {}
  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] nlohmann::json hparams() const override { return {{"share", share_}}; }
  [[nodiscard]] EditResult edit(models::Model& model, std::span<const datasets::Fact> facts,
                                EditContext& context) override {
    EditTransaction scope(model, context.transaction);
    const auto site = model.edit_site(0);
    EditResult result;
    result.editor = name_;
    result.hparams = hparams();
    result.deltas.push_back(
        WeightDelta::as_stored(site.weight_name, 0, model.weight(site.weight_name).to(at::kDouble) * -share_));
    apply_delta(result.deltas.back(), scope);
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

EditorInfo fading() {
  static const auto schema = hparams::Schema<FadingHparams>("fading").field(
      "share", &FadingHparams::share, {.meaning = "what is taken away", .max = 1, .above = 0});
  return editor_entry<FadingHparams>("fading", "takes a share of a weight away", "none", schema,
                                     [](const FadingHparams& h, const hparams::RawHparams&, const models::Model&,
                                        const Log&) { return std::make_unique<Fading>(h.share); });
}

TEST(Session, RunsAnEditorOfTheProgramsOwn) {
  register_editor(fading());
  EXPECT_EQ(find_editor("Fading").name, "fading");
  EXPECT_THROW(register_editor(fading()), Error) << "a name twice";
  EXPECT_THROW(register_editor({}), Error) << "without a name";

  auto model = testing::tiny_model();
  const auto before = all_weights(model);
  const testing::ScratchFolder folder("session-own");
  write_file(folder.path() / "own.yaml", "share: 0.25\n");
  Session session(model, "fading", {.hparams = (folder.path() / "own.yaml").string()});
  (void)session.edit(tiny_facts());
  const auto name = model.edit_site(0).weight_name;
  EXPECT_EQ(changed_weights(model, before), std::vector<std::string>{name});
  EXPECT_TRUE(at::allclose(model.weight(name), before.at(name) * 0.75));
  session.undo();
  EXPECT_TRUE(changed_weights(model, before).empty());
}

TEST(Placing, LoadsWithADeviceMap) {
  const testing::ScratchFolder folder("placing");
  testing::write_tiny_model(folder.path());
  const auto model = models::load_placed(folder.path().string(), {.dtype = at::kBFloat16});
  EXPECT_EQ(model.dtype(), at::kBFloat16);
  EXPECT_TRUE(model.placement().is_single());
  EXPECT_THROW((void)models::load_placed(folder.path().string(), {.device_map = "everywhere"}), Error);
  EXPECT_THROW((void)models::load_placed(folder.path().string(), {.max_memory = "cpu=1KiB"}), Error);
}

}  // namespace
}  // namespace emend::editors
