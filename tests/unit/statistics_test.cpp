#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/devices/runtime.h>
#include <emend/editors/detail/statistics_parts.h>
#include <emend/editors/steps/apply.h>
#include <emend/editors/steps/statistics.h>
#include <emend/hooks/hook_session.h>
#include <emend/models/tokenizer/tokenizer.h>
#include <gtest/gtest.h>

#include "support/collected_events.h"
#include "support/editor_models.h"
#include "support/error_of.h"
#include "support/spread_plan.h"

namespace emend {
namespace statistics_test {

using editors::CorpusStatistics;
using editors::FirstToken;
using editors::StatisticsOptions;
using editors::StatisticsText;
using hooks::Site;
using testing::relative_difference;
using testing::TemporaryFolder;
using testing::tiny_model;

const std::vector<std::string>& documents() {
  static const std::vector<std::string> texts = {
      "Oslo is a town by the sea.", "Ada wrote the first program.", "x",
      "Ur stands in the sand, and no one speaks of it now.",
      "A longer line of text goes here, so that the rows of a batch differ in length."};
  return texts;
}

StatisticsText text_of(std::vector<std::string> texts, const std::string& fingerprint = "f1") {
  StatisticsText text;
  text.fingerprint = fingerprint;
  text.name = "test";
  text.each = [texts = std::move(texts)](const auto& sink) {
    for (const auto& document : texts)
      if (!sink(document)) return;
  };
  return text;
}

// Row after row, token after token, in float64.
at::Tensor naive(const models::Model& model, const std::vector<std::vector<int64_t>>& rows, int layer,
                 bool skip_first) {
  at::Tensor sum;
  int64_t count = 0;
  for (const auto& row : rows) {
    hooks::HookSession session(model.hooks());
    session.capture({Site::kMlpDownIn, layer}).attach();
    (void)model.forward(models::TokenBatch::from_rows({row}));
    const at::Tensor keys = session.captured({Site::kMlpDownIn, layer}).to(at::kDouble);
    for (int64_t t = skip_first ? 1 : 0; t < keys.size(0); ++t, ++count) {
      const at::Tensor outer = keys[t].unsqueeze(1).mm(keys[t].unsqueeze(0));
      sum = sum.defined() ? sum + outer : outer;
    }
  }
  return sum / static_cast<double>(count);
}

std::vector<std::vector<int64_t>> rows_of(const models::Model& model) {
  std::vector<std::vector<int64_t>> rows;
  for (const auto& document : documents()) rows.push_back(model.tokenizer().encode_ids(document));
  return rows;
}

TEST(Statistics, OnePassGivesEveryLayersMoment) {
  for (const char* family : {"llama", "gpt2"}) {
    const models::Model model = tiny_model({.family = family});
    const auto rows = rows_of(model);
    for (const bool skip : {false, true}) {
      StatisticsOptions options;
      options.first_token = skip ? FirstToken::kSkip : FirstToken::kCount;
      options.batch_tokens = 40;  // several batches, one of them a single long row
      const auto moments = editors::collect_second_moments(model, rows, {0, 2}, options);
      ASSERT_EQ(moments.size(), 2U);
      int64_t tokens = 0;
      for (const auto& row : rows) tokens += static_cast<int64_t>(row.size()) - (skip ? 1 : 0);
      for (const int layer : {0, 2}) {
        EXPECT_EQ(moments.at(layer).count(), tokens);
        EXPECT_EQ(moments.at(layer).cov_FF().scalar_type(), at::kDouble);
        EXPECT_LT(relative_difference(moments.at(layer).cov_FF(), naive(model, rows, layer, skip)), 1e-6)
            << family << " layer " << layer << " skip " << skip;
        EXPECT_TRUE(at::equal(moments.at(layer).cov_FF(), moments.at(layer).cov_FF().t()));
      }
    }
  }
}

// Hashing a large model takes as long as reading it back from its device.
TEST(Statistics, HashTheWeightsOnce) {
  const models::Model model = tiny_model({.place = testing::over_devices({testing::sim(5)})});
  int64_t weights = 0;
  for (const auto& name : model.weight_names()) weights += static_cast<int64_t>(model.weight(name).nbytes());
  const TemporaryFolder folder("hash-once");
  StatisticsOptions options;
  options.cache = folder.path();
  CorpusStatistics statistics(text_of(documents()), options);
  const devices::TransferScope scope;
  statistics.prepare(model, {0, 1});
  EXPECT_GE(scope.total(devices::Purpose::kHost).bytes, weights);
  EXPECT_LT(scope.total(devices::Purpose::kHost).bytes, 2 * weights);
}

TEST(Statistics, StopsAfterTheLastLayerThatIsNeeded) {
  const models::Model model = tiny_model();
  int fired = 0;
  const auto handle = model.hooks().at({Site::kMlpDownOut, 1}).add([&](const at::Tensor&) {
    ++fired;
    return at::Tensor();
  });
  (void)editors::collect_second_moments(model, rows_of(model), {0, 1}, {});
  EXPECT_EQ(fired, 0);
}

TEST(Statistics, ReadsOnlyAsMuchAsIsWanted) {
  const models::Model model = tiny_model();
  StatisticsOptions options;
  options.tokens = 30;
  CorpusStatistics some(text_of(documents()), options);
  some.prepare(model, {1});
  EXPECT_GE(some.get(1).count(), 30);
  EXPECT_LT(some.get(1).count(), 110);
  options.tokens = 0;  // ten a dimension: all there is
  CorpusStatistics all(text_of(documents()), options);
  all.prepare(model, {1});
  int64_t total = 0;
  for (const auto& document : documents()) total += static_cast<int64_t>(document.size());
  EXPECT_EQ(all.get(1).count(), total);
  options.max_length = 8;
  CorpusStatistics cut(text_of(documents()), options);
  cut.prepare(model, {1});
  EXPECT_EQ(cut.get(1).count(), 4 * 8 + 1);
}

// What was computed serves, though there is no place to keep it.
TEST(Statistics, ACacheThatCannotBeWrittenIsAWarning) {
  const TemporaryFolder folder("statistics");
  write_file(folder.path() / "file", "no folder");
  models::Model model = tiny_model();
  const auto sink = std::make_shared<testing::CollectedEvents>();
  StatisticsOptions options;
  options.cache = folder.path() / "file";
  options.log = Log({sink});
  CorpusStatistics statistics(text_of(documents()), options);
  statistics.prepare(model, {0, 1});
  EXPECT_GT(statistics.get(1).count(), 0);
  const auto kept = statistics.kept(model, "things", {1}, [](const std::vector<int>&) {
    return editors::StatisticsProvider::Kept{{1, {{"x", at::ones({2})}}}};
  });
  EXPECT_EQ(kept.at(1).at("x").numel(), 2);
  EXPECT_EQ(sink->count("statistics.cache"), 3);
}

// Text and whatever else an editor derives from it are as large as moments, and come without them.
TEST(Statistics, WhatEditorsKeepStaysWithinTheBoundOfTheCache) {
  const TemporaryFolder folder("statistics");
  const models::Model model = tiny_model();
  StatisticsOptions options;
  options.cache = folder.path();
  CorpusStatistics statistics(text_of(documents()), options);
  ::setenv("EMEND_CACHE_GIB", "0.00002", 1);  // 21 KB: each of these files has 16
  for (const char* what : {"things", "others", "more"})
    (void)statistics.kept(model, what, {1}, [](const std::vector<int>&) {
      return editors::StatisticsProvider::Kept{{1, {{"x", at::ones({4096})}}}};
    });
  ::unsetenv("EMEND_CACHE_GIB");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(Statistics, CacheIsUsedUntilSomethingChanges) {
  const TemporaryFolder folder("statistics");
  models::Model model = tiny_model();
  const auto run = [&](const models::Model& m, const StatisticsText& text,
                       const std::function<void(StatisticsOptions&)>& change = {}) {
    StatisticsOptions options;
    options.cache = folder.path();
    if (change) change(options);
    CorpusStatistics statistics(text, options);
    statistics.prepare(m, {0, 1});
    return statistics.describe()["layers_from_cache"].size();
  };
  const auto text = text_of(documents());
  EXPECT_EQ(run(model, text), 0U);
  EXPECT_EQ(run(model, text), 2U);
  // Every input that changes the numbers misses the cache.
  EXPECT_EQ(run(model, text_of(documents(), "f2")), 0U);
  EXPECT_EQ(run(model, text, [](auto& o) { o.tokens = 50; }), 0U);
  EXPECT_EQ(run(model, text, [](auto& o) { o.max_length = 9; }), 0U);
  EXPECT_EQ(run(model, text, [](auto& o) { o.dtype = at::kFloat; }), 0U);
  EXPECT_EQ(run(model, text, [](auto& o) { o.first_token = FirstToken::kSkip; }), 0U);
  EXPECT_EQ(run(model, text, [](auto& o) { o.seed = 5; }), 0U);
  EXPECT_EQ(run(tiny_model({.seed = 2}), text), 0U) << "another model of the same shape";
  EXPECT_EQ(run(tiny_model({.bos = true}), text), 0U) << "another tokenizer";
  {
    const devices::Tf32Products products(true);
    EXPECT_EQ(run(model, text), 0U) << "products of another precision";
  }
  editors::EditTransaction transaction(model);
  (void)editors::apply_delta(editors::WeightDelta::dense(model.edit_site(0), at::ones({32, 48}, at::kDouble)),
                             transaction);
  EXPECT_EQ(run(model, text), 0U) << "the same model, edited";
  transaction.restore();
  EXPECT_EQ(run(model, text), 2U);
  {
    const auto hook = model.hooks().at({hooks::Site::kMlpOut, 0}).add([](const at::Tensor& x) { return x * 0; });
    EXPECT_EQ(run(model, text), 0U) << "what passes compute is not in the weights";
    EXPECT_EQ(run(model, text, [](auto& o) { o.seed = 6; }), 0U);
  }
  EXPECT_EQ(run(model, text, [](auto& o) { o.seed = 6; }), 0U) << "nothing was kept of it";
  EXPECT_EQ(run(model, text), 2U);
}

TEST(Statistics, CachedNumbersAreTheComputedOnes) {
  const TemporaryFolder folder("statistics");
  const models::Model model = tiny_model();
  StatisticsOptions options;
  options.cache = folder.path();
  CorpusStatistics first(text_of(documents()), options), second(text_of(documents()), options);
  first.prepare(model, {2});
  second.prepare(model, {2});
  EXPECT_EQ(second.describe()["layers_from_cache"], nlohmann::json({2}));
  EXPECT_TRUE(at::equal(first.get(2).cov_FF(), second.get(2).cov_FF()));
  EXPECT_EQ(first.get(2).count(), second.get(2).count());
  EXPECT_EQ(second.get(2).origin()["text"], "test");
}

TEST(Statistics, DamagedFilesAreReportedAndComputedAgain) {
  const TemporaryFolder folder("statistics");
  const models::Model model = tiny_model();
  const auto sink = std::make_shared<testing::CollectedEvents>();
  StatisticsOptions options;
  options.cache = folder.path();
  options.log = Log({sink});
  CorpusStatistics good(text_of(documents()), options);
  good.prepare(model, {1});
  const auto file = std::filesystem::directory_iterator(folder.path())->path();
  const std::string bytes = read_file(file);
  for (const size_t damage : {size_t{0}, size_t{1}, size_t{2}}) {
    std::string broken = bytes;
    if (damage == 0) broken[bytes.size() - 9] ^= 1;    // a number
    if (damage == 1) broken.resize(bytes.size() / 2);  // cut
    if (damage == 2) broken = "no statistics at all";
    write_file(file, broken);
    EXPECT_THROW((void)editors::load_second_moment(file, file.stem().string()), Error);
    sink->events.clear();
    CorpusStatistics again(text_of(documents()), options);
    again.prepare(model, {1});
    EXPECT_EQ(sink->count("statistics.damaged"), 1) << damage;
    EXPECT_TRUE(at::equal(again.get(1).cov_FF(), good.get(1).cov_FF()));
    EXPECT_EQ(read_file(file), bytes) << "written anew";
  }
  EXPECT_FALSE(editors::load_second_moment(folder.path() / "absent.safetensors", "x").has_value());
  EXPECT_THROW((void)editors::load_second_moment(file, "another key"), Error);
}

TEST(Statistics, WithoutACorpusTheModelWritesTheText) {
  const models::Model model = tiny_model();
  StatisticsOptions options;
  options.tokens = 300;
  options.seed = 3;
  CorpusStatistics first(std::nullopt, options), second(std::nullopt, options);
  first.prepare(model, {1});
  second.prepare(model, {1});
  EXPECT_GE(first.get(1).count(), 250);
  EXPECT_TRUE(at::equal(first.get(1).cov_FF(), second.get(1).cov_FF()));
  EXPECT_EQ(first.describe()["source"], "sampled from the model");
  // Texts are broken off where there are enough tokens: one more of each, and of each beginning, at most.
  options.tokens = 4000;
  CorpusStatistics more(std::nullopt, options);
  more.prepare(model, {1});
  EXPECT_GE(more.get(1).count(), 3900);
  EXPECT_LE(more.get(1).count(), 4200);
  options.tokens = 300;
  options.seed = 4;
  CorpusStatistics other(std::nullopt, options);
  other.prepare(model, {1});
  EXPECT_FALSE(at::equal(first.get(1).cov_FF(), other.get(1).cov_FF()));
}

TEST(Statistics, TalkIsWrittenByTheModelWhateverTheTextIs) {
  const models::Model model = tiny_model();
  const TemporaryFolder folder("talk");
  StatisticsOptions options;
  options.seed = 3;
  options.cache = folder.path();
  CorpusStatistics corpus(text_of(documents()), options), none(std::nullopt, options);
  const auto talk = corpus.rows(model, 400, editors::Rows::kTalk);
  EXPECT_GE(editors::detail::tokens_of(talk), 400);
  EXPECT_NE(talk, corpus.rows(model, 400));
  EXPECT_EQ(talk, corpus.rows(model, 400, editors::Rows::kTalk)) << "from the cache";
  EXPECT_NE(talk, none.rows(model, 400)) << "other beginnings";
  EXPECT_EQ(talk, none.rows(model, 400, editors::Rows::kTalk)) << "of the model alone";
}

TEST(Statistics, WarnsOfTooFewTokensAndRefusesNone) {
  const models::Model model = tiny_model();
  const auto sink = std::make_shared<testing::CollectedEvents>();
  StatisticsOptions options;
  options.log = Log({sink});
  CorpusStatistics few(text_of({"too short"}), options);
  few.prepare(model, {1});
  EXPECT_EQ(sink->count("statistics.few_tokens"), 1);
  EXPECT_EQ(sink->count("statistics.short_text"), 0) << "one of them is enough";
  CorpusStatistics none(text_of({}), options);
  EXPECT_THROW(none.prepare(model, {1}), Error);
  EXPECT_THROW((void)few.get(3), Error);
  const TemporaryFolder folder("statistics");
  options.cache = folder.path();
  options.tokens = 100'000;
  for (int time = 1; time <= 2; ++time) {
    CorpusStatistics short_text(text_of(documents()), options);
    short_text.prepare(model, {0, 1});
    EXPECT_EQ(sink->count("statistics.short_text"), time) << "from the cache, too";
  }
}

TEST(Statistics, FixedOnesMustFitTheModel) {
  const models::Model model = tiny_model();
  editors::FixedStatistics wrong({{1, editors::SecondMoment(testing::random_spd(20, 1))}});
  EXPECT_THROW(wrong.prepare(model, {1}), Error);
  EXPECT_THROW(wrong.prepare(model, {2}), Error);
  auto right = testing::tiny_statistics(model);
  EXPECT_NO_THROW(right.prepare(model, {0, 1, 2, 3}));
}

TEST(Statistics, CanBeCancelled) {
  const models::Model model = tiny_model();
  StatisticsOptions options;
  options.cancel.request();
  CorpusStatistics statistics(text_of(documents()), options);
  (void)testing::error_of([&] { statistics.prepare(model, {1}); }, ErrorClass::kCancelled);
}

}  // namespace statistics_test
}  // namespace emend
