#include <emend/core/mapped.h>
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

// Texts of one kind, as the model writes them.
struct Writing {
  std::span<const char* const> beginnings;
  int64_t wanted = 0;  // tokens
  int64_t begun = 0;   // texts, those that were passed over included
  TokenRows rows = {};

  [[nodiscard]] int64_t missing() const { return wanted - tokens_of(rows); }
};

class SampledRows final : public RowSource {
 public:
  SampledRows(const models::Model& model, const StatisticsOptions& options)
      : model_(model), options_(options), length_(std::min(kSampledLength, row_limit(model, options))) {
    if (const auto dtype = sampling_dtype(model); dtype != model.dtype())
      copy_.emplace(models::compute_copy(model, dtype, 0));
  }

  TokenRows take(int64_t tokens) override { return write({Writing{kBeginnings, tokens, begun_}}).front(); }
  void skip(int64_t rows) override { begun_ += rows; }
  [[nodiscard]] bool exhausted() const override { return false; }

  // Of every kind at least what is wanted, in passes over rows of all kinds.
  std::vector<TokenRows> write(std::vector<Writing> kinds) {
    int64_t total = 0;
    std::vector<int64_t> most;  // texts of a kind: a model that ends every one at once would never give enough
    for (const auto& kind : kinds) {
      total += kind.wanted;
      most.push_back(kind.begun + 4 * std::max<int64_t>(1, (kind.wanted + length_ - 1) / length_) + kSampledRows);
    }
    for (;;) {
      options_.cancel.check("statistics");
      std::vector<Pass> passes;
      int64_t have = 0;
      for (size_t k = 0; k < kinds.size(); ++k) {
        have += std::min(kinds[k].wanted, tokens_of(kinds[k].rows));
        if (kinds[k].missing() > 0 && kinds[k].begun < most[k]) passes.push_back(begin(kinds[k]));
      }
      if (passes.empty()) break;
      std::mutex mutex;
      sample(passes, [&](int64_t more) {  // tokens that a group has
        const std::lock_guard lock(mutex);
        have += more;
        if (options_.progress)
          options_.progress(
              {"sampling text", static_cast<double>(std::min(have, total)), static_cast<double>(total), ""});
      });
    }
    begun_ = kinds.front().begun;
    return mapped(std::move(kinds), [](Writing& kind) { return std::move(kind.rows); });
  }

 private:
  // Texts that are written at once.
  struct Pass {
    Writing& kind;
    TokenRows rows;  // with their beginnings
    models::GenerateOptions options;
  };

  Pass begin(Writing& kind) const {
    const auto& tokenizer = model_.tokenizer();
    const auto wanted =
        static_cast<int64_t>(kSpareRows * static_cast<double>(kind.missing()) / static_cast<double>(length_)) + 1;
    Pass pass{kind, {}, {.temperature = 1, .top_k = kSampledTopK}};
    pass.options.seed = options_.seed * 1000003 + static_cast<uint64_t>(kind.begun);
    pass.options.stop_ids = tokenizer.eos_ids();
    pass.options.cancel = options_.cancel;
    size_t longest = 2;
    for (int64_t r = 0; r < std::min(kSampledRows, wanted); ++r) {
      const auto number = static_cast<size_t>(kind.begun++);
      auto& row = pass.rows.emplace_back(tokenizer.encode_prompt(kind.beginnings[number % kind.beginnings.size()]).ids);
      if (row.empty()) row.push_back(tokenizer.bos_id().value_or(0));
      longest = std::max(longest, row.size());
    }
    const int64_t room = row_limit(model_, options_) - static_cast<int64_t>(longest);
    pass.options.max_new_tokens = std::max<int64_t>(1, std::min(length_ - 2, room));
    return pass;
  }

  // What a group writes of a pass: rows [begin, end), broken off where all of the pass together have enough.
  struct Share {
    Pass& pass;
    int64_t begin, end;
    bool enough = false;

    [[nodiscard]] int64_t tokens() const {
      return tokens_of(std::span(pass.rows).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)));
    }
    void add_to(std::vector<models::BatchRow>& texts) {
      models::GenerateOptions options = pass.options;
      // Enough is found between two steps, so that the rows end at one length; what they then still say is not taken.
      options.on_token = [this](int64_t row, int64_t id) {
        if (!enough) pass.rows[static_cast<size_t>(row)].push_back(id);
      };
      options.ends = [this](int64_t, int64_t) { return enough; };
      const auto shared = std::make_shared<const models::GenerateOptions>(std::move(options));
      for (int64_t r = begin; r < end; ++r) texts.push_back({pass.rows[static_cast<size_t>(r)], shared, r});
    }
  };

  void sample(std::vector<Pass>& passes, const std::function<void(int64_t)>& tell) {
    size_t n_rows = 0;
    for (const auto& pass : passes) n_rows += pass.rows.size();
    const models::Model& writer = copy_ ? *copy_ : model_;
    const auto groups = static_cast<int64_t>(models::groups_of_rows(writer, n_rows));
    models::side_by_side(writer, groups, [&](int64_t group) {
      std::vector<Share> shares;
      for (auto& pass : passes) {
        const int64_t n = std::ssize(pass.rows);
        shares.push_back({pass, n * group / groups, n * (group + 1) / groups});
      }
      std::vector<models::BatchRow> texts;
      for (auto& share : shares) share.add_to(texts);
      const int64_t often = kTellEvery * std::ssize(texts);
      models::RunningBatch batch(writer);
      batch.add(std::move(texts));
      for (int64_t told = 0;; batch.step()) {
        int64_t have = 0;
        bool over = true;
        for (auto& share : shares) {
          const int64_t tokens = share.tokens();
          share.enough = tokens * groups >= share.pass.kind.missing();
          over = over && share.enough;
          have += tokens;
        }
        over = over || batch.active() == 0;
        if (over || have - told >= often) tell(have - std::exchange(told, have));
        if (over) break;
      }
    });
    const auto limit = static_cast<size_t>(row_limit(model_, options_));
    for (auto& [kind, rows, options] : passes)
      for (auto& row : rows) {
        if (row.size() > limit) row.resize(limit);
        kind.rows.push_back(std::move(row));
      }
  }

  const models::Model& model_;
  const StatisticsOptions& options_;
  std::optional<models::Model> copy_;
  int64_t length_;     // of a text, at most
  int64_t begun_ = 0;  // texts that take() gave
};

}  // namespace

std::unique_ptr<RowSource> make_row_source(const models::Model& model, const std::optional<StatisticsText>& text,
                                           const StatisticsOptions& options) {
  if (text) return std::make_unique<TextRows>(model, *text, options);
  return std::make_unique<SampledRows>(model, options);
}

OrdinaryRows written_rows(const models::Model& model, int64_t text_tokens, int64_t talk_tokens,
                          const StatisticsOptions& options) {
  auto rows = SampledRows(model, options).write({Writing{kBeginnings, text_tokens}, Writing{kTalk, talk_tokens}});
  return {std::move(rows[0]), std::move(rows[1])};
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
