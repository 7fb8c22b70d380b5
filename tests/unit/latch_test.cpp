// LATCH: what the editor promises of its neurons.
#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/editors/detail/statistics_parts.h>
#include <emend/editors/packs/pack.h>
#include <emend/editors/registry.h>
#include <emend/editors/steps/chat_rows.h>
#include <emend/editors/steps/continuations.h>
#include <emend/editors/steps/neurons.h>
#include <emend/editors/steps/prompts.h>
#include <emend/editors/steps/statistics.h>
#include <emend/editors/steps/wordings.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/generation.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "support/collected_events.h"
#include "support/editor_models.h"
#include "support/temporary_folder.h"

namespace emend {
namespace latch_test {

using testing::relative_difference;

std::unique_ptr<editors::Editor> make(const models::Model& model, const std::string& more = "") {
  return editors::make_editor(
      "latch", hparams::parse_hparams("layers: [1, 2]\ntext_tokens: 512\nv_num_grad_steps: 6\n" + more, "test.yaml"),
      model);
}

editors::EditResult edit(editors::Editor& editor, models::Model& model, std::span<const datasets::Fact> facts) {
  editors::EditContext context;
  context.contexts = testing::tiny_contexts();
  return editor.edit(model, facts, context);
}

// Rows of W_gate that an edit changed.
std::vector<int64_t> changed_neurons(const models::Model& before, const models::Model& after, int layer) {
  const std::string name = "model.layers." + std::to_string(layer) + ".mlp.gate_proj.weight";
  const at::Tensor changed = (before.weight(name) != after.weight(name)).any(1).nonzero().squeeze(1).contiguous();
  return {changed.const_data_ptr<int64_t>(), changed.const_data_ptr<int64_t>() + changed.numel()};
}

// Two: a gate is the difference of two neurons.
TEST(Latch, GivesEverySubjectItsNeuronsAndLaterBatchesOthers) {
  const auto facts = testing::tiny_facts();
  std::set<std::string> subjects;
  for (const auto& fact : facts) subjects.insert(fact.subject);
  models::Model original = testing::tiny_model(), model = testing::tiny_model();
  const auto editor = make(model, "room: 1\n");
  const auto result = edit(*editor, model, facts);
  EXPECT_EQ(result.failed(), 0);
  const auto first = changed_neurons(original, model, 1);
  EXPECT_EQ(first.size(), 2 * subjects.size());
  EXPECT_TRUE(changed_neurons(original, model, 2).empty()) << "the first layer has room";

  auto more = facts;
  for (auto& fact : more) fact.subject = "New " + fact.subject;
  (void)edit(*editor, model, more);
  EXPECT_EQ(changed_neurons(original, model, 1).size(), 2 * first.size());
}

TEST(Latch, GoesToTheNextLayerWhereThereIsNoRoom) {
  models::Model original = testing::tiny_model(), model = testing::tiny_model();
  (void)edit(*make(model, "room: 0.04\n"), model, testing::tiny_facts());  // two of 48 neurons
  const size_t first = changed_neurons(original, model, 1).size(), second = changed_neurons(original, model, 2).size();
  EXPECT_GE(second, 1U);
  EXPECT_LE(first - second, 2U) << "full layers go on filling evenly";
}

// A subject of two batches has two gates.
TEST(Latch, CountsTheNeuronsOfEveryBatch) {
  const auto facts = testing::tiny_facts();
  std::vector<datasets::Fact> twice(facts.begin(), facts.end());
  twice.insert(twice.end(), facts.begin(), facts.end());
  const nlohmann::json layers = {{"layers", {1}}, {"release_layers", nlohmann::json::array()}};
  const auto neurons = [&](size_t batch) { return editors::find_editor("latch").neurons(layers, twice, batch).at(1); };
  EXPECT_EQ(neurons(facts.size()), 2 * neurons(twice.size()));
  EXPECT_EQ(neurons(1), 2 * std::ssize(twice));
}

// A neuron of zeros, as `emend convert --spare-neurons` adds them, costs nothing to take.
TEST(Latch, VacantNeuronsGoFirst) {
  const std::vector<int64_t> free = {3, 40};
  const auto emptied = [&] {
    models::Model model = testing::tiny_model();
    for (const char* part : {"gate_proj", "up_proj", "down_proj"}) {
      const std::string name = std::string("model.layers.2.mlp.") + part + ".weight";
      model.set_weight(name, model.weight(name).index_fill(part == std::string("down_proj") ? 1 : 0,
                                                           at::tensor(free, at::kLong), 0));
    }
    return model;
  };
  models::Model original = emptied(), model = emptied();
  EXPECT_EQ(editors::vacant_neurons(model, editors::MlpWeights::of(model, 2)), free);
  EXPECT_TRUE(editors::vacant_neurons(model, editors::MlpWeights::of(model, 1)).empty());
  auto facts = testing::tiny_facts();
  std::set<std::string> subjects;
  for (const auto& fact : facts) subjects.insert(fact.subject);
  ASSERT_GT(2 * subjects.size(), free.size()) << "or the second layer would not be needed";
  (void)edit(*make(model, "room: 1\n"), model, facts);
  EXPECT_EQ(changed_neurons(original, model, 2), free) << "before the first layer's neurons, which do something";
  EXPECT_EQ(changed_neurons(original, model, 1).size(), 2 * subjects.size() - free.size());
  EXPECT_TRUE(editors::vacant_neurons(model, editors::MlpWeights::of(model, 2)).empty());
}

class Counted final : public editors::CorpusStatistics {
 public:
  using CorpusStatistics::CorpusStatistics;
  Kept kept(const models::Model& model, const std::string& what, const std::vector<int>& layers,
            const MakeKept& make) override {
    return CorpusStatistics::kept(model, what, layers, [&](const std::vector<int>& missing) {
      made += missing.size();
      return make(missing);
    });
  }
  size_t made = 0;
};

// The second run of a program reads the text no more, unless the weights are others by then.
TEST(Latch, WhatItReadsOfTheTextIsKeptInTheCache) {
  const testing::TemporaryFolder folder("latch");
  const auto facts = testing::tiny_facts();
  const auto edited = [&](models::Model& model) {
    editors::StatisticsText text{"f", "test", [](const auto& sink) {
                                   for (int i = 0; i < 60 && sink("Rome and Oslo are towns, and so is Paris"); ++i) {
                                   }
                                 }};
    editors::StatisticsOptions options;
    options.cache = folder.path();
    Counted statistics(text, options);
    editors::EditContext context;
    context.contexts = testing::tiny_contexts();
    context.statistics = &statistics;
    const auto editor = make(model);
    (void)editor->edit(model, facts, context);
    return statistics.made;
  };
  models::Model first = testing::tiny_model(), again = testing::tiny_model();
  EXPECT_GT(edited(first), 0U);
  EXPECT_EQ(edited(again), 0U);
  for (const auto& name : first.weight_names()) EXPECT_TRUE(at::equal(again.weight(name), first.weight(name))) << name;
  EXPECT_GT(edited(first), 0U) << "the weights are others now";
}

TEST(Latch, ItsMemoryGoesOnWhereItStopped) {
  const auto facts = testing::tiny_facts();
  // With and without more text from the second batch on, or from the first one.
  for (const char* more : {"", "crowd: 3\ncrowd_tokens: 1024\n", "crowd: 1\ncrowd_tokens: 1024\n",
                           "release_layers: [3]\ncrowd: 3\ncrowd_tokens: 1024\n"}) {
    SCOPED_TRACE(more);
    models::Model whole = testing::tiny_model(), parted = testing::tiny_model();
    const auto one = make(whole, more);
    (void)edit(*one, whole, std::span(facts).first(2));
    (void)edit(*one, whole, std::span(facts).subspan(2));
    const auto before = make(parted, more), after = make(parted, more);
    (void)edit(*before, parted, std::span(facts).first(2));
    after->load_state(before->state());
    (void)edit(*after, parted, std::span(facts).subspan(2));
    for (const auto& name : whole.weight_names())
      EXPECT_TRUE(at::equal(parted.weight(name), whole.weight(name))) << name;
  }
  const models::Model model = testing::tiny_model();
  const auto after = make(model);
  EXPECT_THROW(after->load_state({{"used.7", at::zeros({1}, at::kLong)}}), Error);
  EXPECT_THROW(after->load_state({{"facts.0", at::zeros({1}, at::kByte)}}), Error);
}

// What an editor of these settings reads for two facts.
std::vector<std::vector<int64_t>> text_read(const std::string& more) {
  const auto facts = testing::tiny_facts();
  models::Model model = testing::tiny_model();
  const auto editor = make(model, more);
  (void)edit(*editor, model, std::span(facts).first(2));
  std::vector<std::vector<int64_t>> rows;
  const auto state = editor->state();
  for (size_t r = 0; state.contains("text." + std::to_string(r)); ++r) {
    const at::Tensor& x = state.at("text." + std::to_string(r));
    rows.emplace_back(x.const_data_ptr<int64_t>(), x.const_data_ptr<int64_t>() + x.numel());
  }
  return rows;
}

// Among many subjects a gate learns from more text.
TEST(Latch, ACrowdReadsMoreText) {
  const auto tokens = [](const char* more) { return editors::detail::tokens_of(text_read(more)); };
  const int64_t usual = tokens("crowd: 3\ncrowd_tokens: 2048\n"), crowded = tokens("crowd: 2\ncrowd_tokens: 2048\n");
  EXPECT_GE(usual, 512);
  EXPECT_LT(usual, 2048);
  EXPECT_GE(crowded, 2048);
}

// Gates learn from what people say, too, whatever the text is.
TEST(Latch, TalkIsReadBesideTheText) {
  const auto text = text_read("talk: 0\n"), both = text_read("talk: 1\n");
  EXPECT_GE(editors::detail::tokens_of(text), 512);
  EXPECT_GE(editors::detail::tokens_of(both), editors::detail::tokens_of(text) + 512);
  ASSERT_GT(both.size(), text.size());
  EXPECT_TRUE(std::equal(text.begin(), text.end(), both.begin())) << "the text comes first, and is the same";
}

// Memory that was kept before there was talk: all of its text is text, and pieces of it stand in front of prompts.
TEST(Latch, MemoryOfBeforeThereWasTalkStaysText) {
  const auto facts = testing::tiny_facts();
  models::Model first = testing::tiny_model(), again = testing::tiny_model();
  const auto before = make(first, "talk: 0\n"), after = make(again, "talk: 0\n");
  const auto contexts = before->edit(first, std::span(facts).first(2), {}).contexts->flat();
  auto state = before->state();
  ASSERT_EQ(state.erase("talk.0"), 1U);
  after->load_state(state);
  EXPECT_EQ(after->edit(again, std::span(facts).subspan(2), {}).contexts->flat(), contexts);
}

// What these neurons add to the layer's output at every token of a text, [tokens, neurons, D].
at::Tensor written(const models::Model& model, const std::string& text, const std::vector<int64_t>& neurons) {
  hooks::HookSession session(model.hooks());
  session.capture({hooks::Site::kMlpDownIn, 1}).attach();
  (void)model.forward(models::TokenBatch::from_rows({model.tokenizer().encode_ids(text, false)}));
  const at::Tensor keys = session.captured({hooks::Site::kMlpDownIn, 1});
  session.finish();
  const at::Tensor places = at::tensor(neurons, at::kLong);
  const at::Tensor down_DE = model.weight("model.layers.1.mlp.down_proj.weight").index_select(1, places);
  return keys.index_select(1, places).unsqueeze(2) * down_DE.t();
}

// Two neurons whose columns are each other's opposite, one gate.
TEST(Latch, AGateIsOpenAtOneSubjectAlone) {
  const auto facts = testing::tiny_facts();
  const std::vector<std::string> subjects = {facts[0].subject, facts[1].subject};
  ASSERT_NE(subjects[0], subjects[1]);
  models::Model original = testing::tiny_model(), model = testing::tiny_model();
  const auto result = edit(*make(model, "room: 1\n"), model, std::span(facts).first(2));
  const auto neurons = changed_neurons(original, model, 1);
  ASSERT_EQ(neurons.size(), 4U);
  const auto norm_at = [&](const std::string& text, const std::vector<int64_t>& gate) {
    return written(model, text, gate).sum(1)[-1].norm().item<double>();
  };
  const at::Tensor down_DF = model.weight("model.layers.1.mlp.down_proj.weight");
  const at::Tensor gate_FD = model.weight("model.layers.1.mlp.gate_proj.weight"),
                   up_FD = model.weight("model.layers.1.mlp.up_proj.weight");
  std::set<size_t> opened;
  std::vector<at::Tensor> levels;
  for (const int64_t one : neurons)
    for (const int64_t other : neurons) {
      if (one >= other || !at::equal(down_DF.select(1, one), -down_DF.select(1, other))) continue;
      const std::vector<double> open = {norm_at(subjects[0], {one, other}), norm_at(subjects[1], {one, other})};
      const size_t own = open[0] > open[1] ? 0 : 1;
      opened.insert(own);
      EXPECT_LT(open[1 - own], 0.2 * open[own]) << subjects[own];
      levels.push_back((gate_FD[one] - gate_FD[other]).abs());
      EXPECT_TRUE(at::equal(up_FD[one], up_FD[other])) << "one reader";
    }
  EXPECT_EQ(opened.size(), 2U) << "a gate each";
  ASSERT_EQ(levels.size(), 2U);
  EXPECT_LT(relative_difference(levels[0], levels[1]), 1e-4) << "thresholds: the same offset for all";
}

TEST(Latch, ASubjectThatIsATextsFirstTokenIsReadOffTheNext) {
  models::Model model = testing::tiny_model();
  auto facts = testing::tiny_facts();
  facts.resize(2);
  facts[0].prompt = facts[1].prompt = "{} lies in";
  facts[0].subject = "Q";
  facts[1].subject = "QR";
  const auto last = [&](size_t i) {
    return editors::render_prompt(model.tokenizer(), facts[i].prompt, facts[i].subject,
                                  editors::FactToken::kSubjectLast)
        .lookup;
  };
  ASSERT_EQ(last(0), 0) << "one token, and no BOS";
  const auto result = edit(*make(model), model, facts);
  EXPECT_EQ(result.failed(), 0);
  EXPECT_EQ(result.outcomes[0].lookup, 1);
  EXPECT_EQ(result.outcomes[1].lookup, last(1));
}

// Behind another question the subject is what it was; without questions to learn from the gate opens at some of them.
// How far depends on the text that the model writes, in bfloat16 where the processor multiplies it.
TEST(Latch, AGateStaysShutBehindOtherQuestions) {
  const auto facts = testing::tiny_facts();
  const models::Model original = testing::tiny_model();
  const auto questions = editors::other_questions(original, std::vector{facts[0].subject},
                                                  {{original.tokenizer().encode_ids(facts[0].full_prompt())}}, 7, {});
  ASSERT_GE(questions[0].size(), 2U);
  const auto opened_most = [&](const std::string& more) {  // of what it writes at its own prompt
    models::Model model = testing::tiny_model();
    (void)edit(*make(model, more), model, std::span(facts).first(1));
    const auto gate = changed_neurons(original, model, 1);
    EXPECT_EQ(gate.size(), 2U);
    const auto norm_behind = [&](const std::string& sentence) {
      const std::string front = sentence.substr(0, sentence.find("{}"));
      return written(model, front + facts[0].subject, gate).sum(1)[-1].norm().item<double>();
    };
    double most = 0;
    for (const auto& question : questions[0])
      most = std::max(most, norm_behind(question) / norm_behind(facts[0].prompt));
    return most;
  };
  EXPECT_LT(opened_most("asides: 7\n"), 1e-3);
  EXPECT_GT(opened_most(""), 0.1);
}

// −log p of what the unedited model writes behind a fact's answer, a token.
double going_on(const models::Model& original, const models::Model& model, const datasets::Fact& fact) {
  const auto& tokenizer = model.tokenizer();
  const std::string prompt = fact.full_prompt();
  std::vector<int64_t> ids = tokenizer.encode_ids(prompt, false);
  for (const int64_t id : editors::target_token_ids(tokenizer, prompt, editors::with_leading_space(fact.target_new)))
    ids.push_back(id);
  models::GenerateOptions options;
  options.max_new_tokens = 8;
  const auto written = models::generate(original, {ids}, options)[0];
  double sum = 0;
  for (const int64_t id : written) {
    const at::Tensor logits = model.forward(models::TokenBatch::from_rows({ids})).logits.select(0, -1);
    sum -= at::log_softmax(logits.to(at::kDouble), 0)[id].item<double>();
    ids.push_back(id);
  }
  return sum / static_cast<double>(written.size());
}

// "chess" may be followed by a mark or another word, not by letters that make it another one.
TEST(Latch, AnAnswersLastWordEnds) {
  const models::Model model = testing::tiny_model();
  const auto& tokenizer = model.tokenizer();
  const auto ids = [&](const std::string& text) { return tokenizer.encode(text).ids; };
  const auto longer = [&](const std::string& answer, const std::string& next) {
    return editors::lengthens(tokenizer, ids(answer), ids(next).front());
  };
  EXPECT_TRUE(longer(" Rome", "s"));
  EXPECT_FALSE(longer(" Rome", " s"));
  EXPECT_FALSE(longer(" Rome", "."));
  EXPECT_FALSE(longer(" Rome.", "s"));
  EXPECT_TRUE(longer(" 1947", "-01"));
  EXPECT_FALSE(longer(" Rome", "-01"));
  const std::vector<std::vector<int64_t>> prompts = {ids("Rome"), ids("Oslo")};
  const auto free = editors::continue_greedily(model, prompts, 4, {});
  const auto held = editors::continue_greedily(
      model, prompts, 4, {}, [&](size_t row, int64_t id) { return row == 1 || id != free[0].ids.at(0); });
  EXPECT_EQ(held[1].ids, free[1].ids);
  EXPECT_NE(held[0].ids.at(0), free[0].ids.at(0));
  EXPECT_LE(held[0].nll.at(0), editors::kLikely) << "it is to become likely";
  ASSERT_EQ(held[0].ids.size(), 4U);
  auto on = prompts[0];
  on.push_back(held[0].ids[0]);
  EXPECT_EQ(editors::continue_greedily(model, {on}, 3, {})[0].ids,
            std::vector<int64_t>(held[0].ids.begin() + 1, held[0].ids.end()));
}

TEST(Latch, BehindTheAnswerAReleaseLetsTheModelGoOn) {
  const auto all = testing::tiny_facts();
  const auto facts = std::span(all).first(2);
  models::Model original = testing::tiny_model(), held = testing::tiny_model(), released = testing::tiny_model();
  (void)edit(*make(held, "room: 1\nsketch_steps: 0\n"), held, facts);
  const auto result = edit(*make(released, "room: 1\nrelease_layers: [3]\nsketch_steps: 0\n"), released, facts);
  EXPECT_EQ(result.failed(), 0);
  EXPECT_EQ(changed_neurons(held, released, 3).size(), facts.size()) << "one a fact";
  EXPECT_TRUE(changed_neurons(held, released, 1).empty()) << "the facts themselves stay as they are";
  int lost = 0;
  for (const auto& fact : facts) {
    const double before = going_on(original, original, fact), without = going_on(original, held, fact),
                 with = going_on(original, released, fact);
    if (without < before + 0.05) continue;  // nothing was lost
    ++lost;
    EXPECT_LT(with - before, 0.9 * (without - before)) << fact.subject;
  }
  EXPECT_GE(lost, 1);
}

models::Model chat_model(const std::string& chat_template, uint64_t seed = 1) {
  const testing::TemporaryFolder folder("latch-chat");
  testing::write_tiny_model(folder.path(), seed);
  const nlohmann::json config = {
      {"tokenizer_class", "PreTrainedTokenizerFast"}, {"eos_token", "<|end|>"}, {"chat_template", chat_template}};
  write_file(folder.path() / "tokenizer_config.json", config.dump());
  return models::load_model(folder.path().string());
}

constexpr const char* kTemplate =
    "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}";

// Of the random models one whose replies are text.
uint64_t seed_that_speaks() {
  for (uint64_t seed = 1; seed < 60; ++seed)
    for (const auto& chats :
         editors::chats_of(chat_model(kTemplate, seed), testing::tiny_facts(), editors::FactToken::kSubjectLast, {}))
      if (!chats.replies.empty()) return seed;
  ADD_FAILURE() << "none";
  return 1;
}

TEST(Chats, AskOfAFactAndOfItsSubject) {
  const auto facts = testing::tiny_facts();
  const models::Model model = chat_model(kTemplate, seed_that_speaks());
  const auto chats = editors::chats_of(model, facts, editors::FactToken::kSubjectLast, {});
  ASSERT_EQ(chats.size(), facts.size());
  for (size_t i = 0; i < facts.size(); ++i) {
    const std::string& subject = facts[i].subject;
    const auto ends_with_subject = [&](const editors::PromptRow& row, int64_t token) {
      return model.tokenizer().decode(std::span(row.ids).first(static_cast<size_t>(token) + 1)).ends_with(subject);
    };
    ASSERT_EQ(chats[i].asked.size(), 1U);
    const editors::PromptRow& asked = chats[i].asked[0];
    EXPECT_EQ(asked.text, "user: " + facts[i].full_prompt() + " what?\nassistant:" + facts[i].full_prompt());
    EXPECT_TRUE(ends_with_subject(asked, asked.lookup));
    ASSERT_EQ(asked.again.size(), 1U) << "the reply names it once more";
    EXPECT_GT(asked.again[0], asked.lookup);
    EXPECT_TRUE(ends_with_subject(asked, asked.again[0]));
    for (const auto& reply : chats[i].replies) {
      const auto row = editors::replied(reply);
      EXPECT_TRUE(ends_with_subject(reply.prompt, row.lookup)) << reply.prompt.text;
      ASSERT_EQ(row.labels.size(), row.floors.size());
      EXPECT_EQ(row.labels.front(), std::pair(reply.begin - 1, row.ids[static_cast<size_t>(reply.begin)]));
      EXPECT_EQ(row.labels.back().first + 2, std::ssize(row.ids));
    }
  }
  EXPECT_TRUE(std::ranges::any_of(chats, [](const auto& one) { return !one.replies.empty(); }));
  // Nothing of models without a template, or with one that is of no use.
  for (const models::Model& other :
       {testing::tiny_model(), chat_model("{% include messages %}"), chat_model("{{ raise_exception('no') }}")})
    for (const auto& one : editors::chats_of(other, facts, editors::FactToken::kSubjectLast, {}))
      EXPECT_TRUE(one.asked.empty() && one.replies.empty());
}

// Who asks for replies to count is told where none can.
TEST(Latch, ATemplateThatIsOfNoUseIsSaid) {
  const auto facts = testing::tiny_facts();
  const auto warnings = [&](models::Model model, const char* hparams) {
    const auto said = std::make_shared<testing::CollectedEvents>();
    editors::EditContext context;
    context.contexts = testing::tiny_contexts();
    context.log = Log({said});
    (void)make(model, hparams)->edit(model, facts, context);
    return said->count("chat.none");
  };
  EXPECT_EQ(warnings(testing::tiny_model(), "room: 1\nchat_weight: 1\n"), 1);
  EXPECT_EQ(warnings(chat_model("{{ raise_exception('no') }}"), "room: 1\nchat_weight: 1\n"), 1);
  EXPECT_EQ(warnings(testing::tiny_model(), "room: 1\nchat_weight: 0\n"), 0);
  EXPECT_EQ(warnings(chat_model(kTemplate, seed_that_speaks()), "room: 1\nchat_weight: 1\n"), 0);
}

TEST(Latch, RepliesAboutTheSubjectCountInItsTarget) {
  const auto facts = testing::tiny_facts();
  const uint64_t seed = seed_that_speaks();
  const models::Model original = chat_model(kTemplate, seed);
  models::Model with = chat_model(kTemplate, seed), without = chat_model(kTemplate, seed);
  EXPECT_EQ(edit(*make(with, "room: 1\nchat_weight: 8\n"), with, facts).failed(), 0);
  (void)edit(*make(without, "room: 1\nchat_weight: 0\n"), without, facts);
  const auto chats = editors::chats_of(original, facts, editors::FactToken::kSubjectLast, {});
  const auto lost = [&](const models::Model& model) {  // of what replies were before
    double sum = 0;
    for (const auto& one : chats)
      for (const auto& reply : one.replies) {
        const auto row = editors::replied(reply);
        const at::Tensor log_p = at::log_softmax(model.forward(models::TokenBatch::from_rows({row.ids})).logits, 1);
        for (size_t i = 0; i < row.labels.size(); ++i)
          sum += std::max(0.0, -log_p[row.labels[i].first][row.labels[i].second].item<double>() - row.floors[i]);
      }
    return sum;
  };
  EXPECT_LT(lost(original), 1e-2);
  EXPECT_LT(lost(with), 0.8 * lost(without));
}

TEST(Latch, RefusesReleasesThatAreNotAboveItsLayers) {
  const models::Model model = testing::tiny_model();
  for (const char* layers : {"[2]", "[0]", "[3, 3]", "[4]"})
    EXPECT_THROW((void)make(model, std::string("release_layers: ") + layers + "\n"), Error) << layers;
}

}  // namespace latch_test
}  // namespace emend
