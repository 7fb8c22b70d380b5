#include <emend/core/setting.h>
#include <emend/editors/detail/statistics_parts.h>
#include <emend/models/compute_copy.h>
#include <emend/models/generation.h>
#include <emend/models/side_by_side.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <span>
#include <utility>

namespace emend::editors::detail {
namespace {

constexpr size_t kMaxTextBytes = size_t{64} << 20;
constexpr int64_t kSampledLength = 256, kSampledRows = 128, kSampledTopK = 40;
constexpr int64_t kTellEvery = 16;  // tokens of a text
// Some texts end early: a pass begins with this many times the rows that would be needed if none did, and ends once
// there are enough tokens. A second pass for the last few would take as many steps as the first one.
constexpr double kSpareRows = 1.5;

// Beginnings of sampled text, so that a model without BOS does not always start alike.
constexpr std::array kBeginnings = {"The",     "In",     "It",    "A",    "He",      "She",  "They", "We",
                                    "This",    "When",   "After", "For",  "As",      "On",   "At",   "From",
                                    "With",    "During", "There", "If",   "While",   "One",  "Many", "Since",
                                    "Because", "What",   "How",   "Most", "Another", "Some", "By",   "Before"};

// Beginnings of what people say to each other.
constexpr std::array kTalk = {"\"I",        "\"What", "“You",    "‘Well,",  "\"No",      "She said,", "\"Don't",
                              "He looked",  "I was",  "You can", "\"Why",   "“I don’t",  "Her eyes",  "My",
                              "Once",       "\"Yes",  "“How",    "Then",    "My mother", "\"Oh",      "Hey",
                              "Dear",       "\"We",   "“They",   "I think", "Suddenly,", "\"Look",    "We were",
                              "That night", "\"He",   "“Where",  "So I"};

at::ScalarType sampling_dtype(const models::Model& model) {
  return models::writing_dtype(model, models::fast_compute_dtype(model));
}

class TextRows final : public RowSource {
 public:
  TextRows(const models::Model& model, const StatisticsText& text, const StatisticsOptions& options)
      : model_(model), text_(text), options_(options) {
    size_t bytes = 0;
    text.each([&](const std::string& document) {
      bytes += document.size();
      documents_.push_back(document);
      return bytes < kMaxTextBytes;
    });
    shuffle(documents_, options.seed);
  }

  TokenRows take(int64_t tokens) override {
    const int64_t skipped = options_.first_token == FirstToken::kSkip ? 1 : 0;
    TokenRows rows;
    for (int64_t counted = 0; counted < tokens && !exhausted();) {
      options_.cancel.check("statistics");
      auto ids = next_row();
      const int64_t count = static_cast<int64_t>(ids.size()) - skipped;
      if (count <= 0) continue;
      counted += count;
      ++given_;
      rows.push_back(std::move(ids));
    }
    if (given_ == 0) refuse({text_.name, "no tokens", "text", "give another " + setting("corpus")});
    return rows;
  }

  void skip(int64_t rows) override {
    const size_t least = options_.first_token == FirstToken::kSkip ? 2 : 1;
    for (int64_t r = 0; r < rows && !exhausted();) r += next_row().size() >= least ? 1 : 0;
    given_ += rows;
  }

  [[nodiscard]] bool exhausted() const override { return next_ == documents_.size(); }

 private:
  std::vector<int64_t> next_row() {
    const auto limit = static_cast<size_t>(row_limit(model_, options_));
    // A token is at most a few dozen bytes; a whole book need not be encoded for its first words.
    const std::string& document = documents_[next_++];
    std::string_view head = document;
    if (head.size() > limit * 64) {
      size_t end = limit * 64;
      while (end > 0 && (static_cast<unsigned char>(head[end]) & 0xC0) == 0x80) --end;
      head = head.substr(0, end);
    }
    auto ids = model_.tokenizer().encode_ids(head, true);
    if (ids.size() > limit) ids.resize(limit);
    return ids;
  }

  const models::Model& model_;
  const StatisticsText& text_;
  const StatisticsOptions& options_;
  std::vector<std::string> documents_;
  size_t next_ = 0;
  int64_t given_ = 0;
};

class SampledRows final : public RowSource {
 public:
  SampledRows(const models::Model& model, const StatisticsOptions& options, Rows kind)
      : model_(model), options_(options), beginnings_(kind == Rows::kTalk ? kTalk : kBeginnings) {
    if (const auto dtype = sampling_dtype(model); dtype != model.dtype())
      copy_.emplace(models::compute_copy(model, dtype, 0));
  }

  TokenRows take(int64_t tokens) override {
    const int64_t length = std::min(kSampledLength, row_limit(model_, options_));
    TokenRows rows;
    // A model that ends every text at once would never give enough.
    const int64_t most = begun_ + 4 * std::max<int64_t>(1, (tokens + length - 1) / length) + kSampledRows;
    for (int64_t counted = 0; counted < tokens && begun_ < most;) {
      options_.cancel.check("statistics");
      const auto wanted =
          static_cast<int64_t>(kSpareRows * static_cast<double>(tokens - counted) / static_cast<double>(length)) + 1;
      std::mutex mutex;
      int64_t have = counted;
      const auto tell = [&](int64_t more) {  // tokens that a group has
        const std::lock_guard lock(mutex);
        have += more;
        if (options_.progress)
          options_.progress(
              {"sampling text", static_cast<double>(std::min(have, tokens)), static_cast<double>(tokens), ""});
      };
      for (auto& row : sample(std::min(kSampledRows, wanted), length, tokens - counted, tell)) {
        counted += static_cast<int64_t>(row.size());
        rows.push_back(std::move(row));
      }
    }
    return rows;
  }

  void skip(int64_t rows) override { begun_ += rows; }
  [[nodiscard]] bool exhausted() const override { return false; }

 private:
  TokenRows prompts_of(int64_t n_rows) const {
    const auto& tokenizer = model_.tokenizer();
    TokenRows prompts;
    for (int64_t r = begun_; r < begun_ + n_rows; ++r) {
      prompts.push_back(tokenizer.encode_prompt(beginnings_[static_cast<size_t>(r) % beginnings_.size()]).ids);
      if (prompts.back().empty()) prompts.back().push_back(tokenizer.bos_id().value_or(0));
    }
    return prompts;
  }

  // Texts of at most `length` tokens, broken off where all of them together have `enough`.
  TokenRows sample(int64_t n_rows, int64_t length, int64_t enough, const std::function<void(int64_t)>& tell) {
    TokenRows rows = prompts_of(n_rows);
    size_t longest = 2;
    for (const auto& row : rows) longest = std::max(longest, row.size());
    models::GenerateOptions generate;
    generate.temperature = 1;
    generate.top_k = kSampledTopK;
    generate.seed = options_.seed * 1000003 + static_cast<uint64_t>(begun_);
    generate.stop_ids = model_.tokenizer().eos_ids();
    generate.max_new_tokens =
        std::max<int64_t>(1, std::min(length - 2, row_limit(model_, options_) - static_cast<int64_t>(longest)));
    generate.cancel = options_.cancel;
    generate.on_token = [&](int64_t row, int64_t id) { rows[static_cast<size_t>(row)].push_back(id); };
    const auto shared = std::make_shared<const models::GenerateOptions>(std::move(generate));
    const models::Model& writer = copy_ ? *copy_ : model_;
    const auto groups = static_cast<int64_t>(models::groups_of_rows(writer, static_cast<size_t>(n_rows)));
    models::side_by_side(writer, groups, [&](int64_t group) {
      const int64_t begin = n_rows * group / groups, end = n_rows * (group + 1) / groups;
      std::vector<models::BatchRow> texts;
      for (int64_t r = begin; r < end; ++r) texts.push_back({rows[static_cast<size_t>(r)], shared, r});
      const auto tokens = [&] {
        int64_t all = 0;
        for (int64_t r = begin; r < end; ++r) all += std::ssize(rows[static_cast<size_t>(r)]);
        return all;
      };
      int64_t told = 0;
      models::RunningBatch batch(writer);
      batch.add(std::move(texts));
      for (int64_t have = tokens(); batch.active() > 0 && have * groups < enough; have = tokens()) {
        if (have - told >= kTellEvery * (end - begin)) tell(have - std::exchange(told, have));
        batch.step();
      }
      tell(tokens() - told);
    });
    for (auto& row : rows)
      if (std::ssize(row) > row_limit(model_, options_)) row.resize(static_cast<size_t>(row_limit(model_, options_)));
    begun_ += n_rows;
    return rows;
  }

  const models::Model& model_;
  const StatisticsOptions& options_;
  std::span<const char* const> beginnings_;
  std::optional<models::Model> copy_;
  int64_t begun_ = 0;
};

}  // namespace

std::unique_ptr<RowSource> make_row_source(const models::Model& model, const std::optional<StatisticsText>& text,
                                           const StatisticsOptions& options, Rows kind) {
  if (text) return std::make_unique<TextRows>(model, *text, options);
  return std::make_unique<SampledRows>(model, options, kind);
}

int64_t row_limit(const models::Model& model, const StatisticsOptions& options) {
  return std::max<int64_t>(1, std::min(options.max_length, model.max_positions()));
}

nlohmann::json sampling_rule(const models::Model& model) {
  return {"until enough",
          kSampledLength,
          kSampledRows,
          kSpareRows,
          kSampledTopK,
          kBeginnings.size(),
          c10::toString(sampling_dtype(model))};
}

}  // namespace emend::editors::detail
