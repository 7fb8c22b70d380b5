#include <emend/models/tokenizer/detail/byte_level.h>
#include <emend/models/tokenizer/detail/checks.h>
#include <emend/models/tokenizer/detail/pattern.h>
#include <emend/models/tokenizer/detail/pre_tokenizer.h>
#include <emend/models/tokenizer/detail/split_behaviour.h>
#include <emend/models/tokenizer/detail/unicode.h>

#include <algorithm>
#include <optional>
#include <string>

namespace emend::models::detail {
namespace {

constexpr const char* kGpt2Pattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

/// Splits at the matches of a pattern.
class PatternSplit final : public PreTokenizer {
 public:
  PatternSplit(Regex pattern, SplitBehaviour behaviour, bool invert)
      : pattern_(std::move(pattern)), behaviour_(behaviour), invert_(invert) {}

  void split(const Piece& source, PieceSink sink) const override {
    Splitter splitter(source, behaviour_, sink);
    Regex::Scan scan(pattern_, source.text);
    size_t begin = 0, end = 0, done = 0;
    while (scan.next(begin, end)) {
      if (done != begin) splitter.add(done, begin, invert_);
      splitter.add(begin, end, !invert_);
      done = end;
    }
    if (done != source.text.size()) splitter.add(done, source.text.size(), invert_);
    splitter.finish();
  }

 private:
  Regex pattern_;
  SplitBehaviour behaviour_;
  bool invert_;
};

/// Splits at single characters of a class.
class CharacterSplit final : public PreTokenizer {
 public:
  CharacterSplit(bool (*matches)(char32_t), SplitBehaviour behaviour) : matches_(matches), behaviour_(behaviour) {}

  void split(const Piece& source, PieceSink sink) const override {
    Splitter splitter(source, behaviour_, sink);
    const std::string_view text = source.text;
    size_t done = 0;
    for (size_t at = 0; at < text.size();) {
      const size_t next = at + utf8_length(text[at]);
      if (matches_(decode_utf8(text.data() + at))) {
        if (done < at) splitter.add(done, at, false);
        splitter.add(at, next, true);
        done = next;
      }
      at = next;
    }
    if (done < text.size()) splitter.add(done, text.size(), false);
    splitter.finish();
  }

 private:
  bool (*matches_)(char32_t);
  SplitBehaviour behaviour_;
};

/// Puts a prefix in front of text that does not start with it yet.
class AddPrefix final : public PreTokenizer {
 public:
  AddPrefix(std::string prefix, bool only_at_start) : prefix_(std::move(prefix)), only_at_start_(only_at_start) {}

  void split(const Piece& source, PieceSink sink) const override {
    const bool there = source.text.substr(0, prefix_.size()) == prefix_;
    if (there || source.text.empty() || (only_at_start_ && source.original_begin(0) != 0)) return sink(source);
    PieceBuilder builder;
    builder.reserve(prefix_.size() + source.text.size());
    builder.put(prefix_, source, 0, 0);
    builder.keep(source, 0, source.text.size());
    sink(builder.piece());
  }

 private:
  std::string prefix_;
  bool only_at_start_;
};

/// Replaces spaces by another character.
class ReplaceSpaces final : public PreTokenizer {
 public:
  explicit ReplaceSpaces(std::string replacement) : replacement_(std::move(replacement)) {}

  void split(const Piece& source, PieceSink sink) const override {
    if (source.text.find(' ') == std::string_view::npos) return sink(source);
    PieceBuilder builder;
    builder.reserve(source.text.size() + source.text.size() / 2);
    size_t done = 0;
    for (size_t space; (space = source.text.find(' ', done)) != std::string_view::npos; done = space + 1) {
      builder.keep(source, done, space);
      builder.put(replacement_, source, space, space + 1);
    }
    builder.keep(source, done, source.text.size());
    sink(builder.piece());
  }

 private:
  std::string replacement_;
};

class ByteLevelMapping final : public PreTokenizer {
 public:
  void split(const Piece& source, PieceSink sink) const override {
    PieceBuilder builder;
    to_byte_level(source, builder);
    sink(builder.piece());
  }
};

constexpr int kMaxDepth = 32;

void add_metaspace(const JsonView& view, PreTokenizerChain& chain) {
  const std::string replacement = view.at("replacement").string();
  if (replacement.empty() || utf8_length(replacement[0]) != replacement.size())
    view.at("replacement").fail("one character");
  std::string scheme = view.string_or("prepend_scheme", "always");
  if (!view.boolean_or("add_prefix_space", true)) scheme = "never";
  if (scheme != "always" && scheme != "first" && scheme != "never")
    view.at("prepend_scheme").fail("always, first or never");
  chain.steps.push_back(std::make_unique<ReplaceSpaces>(replacement));
  if (scheme != "never") chain.steps.push_back(std::make_unique<AddPrefix>(replacement, scheme == "first"));
  if (view.boolean_or("split", true))
    chain.steps.push_back(std::make_unique<PatternSplit>(Regex::literal(replacement, view.where()),
                                                         SplitBehaviour::kMergedWithNext, false));
}

void add_byte_level(const JsonView& view, PreTokenizerChain& chain) {
  if (view.boolean_or("add_prefix_space", true)) chain.steps.push_back(std::make_unique<AddPrefix>(" ", false));
  if (view.boolean_or("use_regex", true))
    chain.steps.push_back(
        std::make_unique<PatternSplit>(Regex(kGpt2Pattern, view.where()), SplitBehaviour::kIsolated, false));
  chain.steps.push_back(std::make_unique<ByteLevelMapping>());
}

void collect(const JsonView& view, PreTokenizerChain& chain, int depth) {
  if (view.is_null()) return;
  const std::string& type = view.at("type").string();
  const auto add = [&chain](auto step) { chain.steps.push_back(std::move(step)); };
  if (type == "Sequence") {
    if (depth > kMaxDepth) view.fail("sequences nested at most " + std::to_string(kMaxDepth) + " deep");
    for (const JsonView& step : view.at("pretokenizers").elements()) collect(step, chain, depth + 1);
  } else if (type == "ByteLevel") {
    add_byte_level(view, chain);
  } else if (type == "Split") {
    auto pattern = make_pattern(view.at("pattern"));
    const SplitBehaviour behaviour = parse_behaviour(view.at("behavior"));
    if (pattern) add(std::make_unique<PatternSplit>(std::move(*pattern), behaviour, view.boolean_or("invert", false)));
  } else if (type == "Digits") {
    const bool single = view.boolean_or("individual_digits", false);
    add(std::make_unique<CharacterSplit>(&is_numeric,
                                         single ? SplitBehaviour::kIsolated : SplitBehaviour::kContiguous));
  } else if (type == "Punctuation") {
    const SplitBehaviour behaviour =
        view.has("behavior") ? parse_behaviour(view.at("behavior")) : SplitBehaviour::kIsolated;
    add(std::make_unique<CharacterSplit>(&is_punctuation, behaviour));
  } else if (type == "Metaspace") {
    add_metaspace(view, chain);
  } else if (type == "Whitespace") {
    add(std::make_unique<PatternSplit>(Regex(R"(\w+|[^\w\s]+)", view.where()), SplitBehaviour::kRemoved, true));
  } else if (type == "WhitespaceSplit") {
    add(std::make_unique<CharacterSplit>(&is_white_space, SplitBehaviour::kRemoved));
  } else {
    view.unsupported("the pre-tokenizer \"" + excerpt(type) + "\"",
                     "ByteLevel, Split, Digits, Punctuation, Metaspace, Whitespace, WhitespaceSplit or Sequence");
  }
}

void run(const PreTokenizerChain& chain, size_t step, const Piece& piece, PieceSink sink) {
  if (piece.text.empty()) return;
  if (step == chain.steps.size()) return sink(piece);
  auto next = [&](const Piece& part) { run(chain, step + 1, part, sink); };
  chain.steps[step]->split(piece, next);
}

}  // namespace

PreTokenizerChain make_pre_tokenizers(const JsonView& view) {
  PreTokenizerChain chain;
  collect(view, chain, 0);
  const auto is_mapping = [](const auto& step) { return dynamic_cast<const ByteLevelMapping*>(step.get()) != nullptr; };
  if (!chain.steps.empty() && is_mapping(chain.steps.back()) &&
      std::count_if(chain.steps.begin(), chain.steps.end(), is_mapping) == 1) {
    chain.steps.pop_back();
    chain.byte_level = true;
  }
  return chain;
}

void pre_tokenise(const PreTokenizerChain& chain, const Piece& source, PieceSink sink) {
  run(chain, 0, source, sink);
}

}  // namespace emend::models::detail
