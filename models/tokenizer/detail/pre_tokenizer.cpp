#include <emend/core/text.h>
#include <emend/models/tokenizer/detail/steps.h>
#include <emend/models/tokenizer/detail/unicode.h>

namespace emend::models::detail {
namespace {

constexpr const char* kGpt2Pattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

/// What happens to the delimiters when text is split: the "behavior" values. On "the-final--countdown" with "-":
enum class SplitBehaviour {
  kRemoved,             ///< the, final, countdown
  kIsolated,            ///< the, -, final, -, -, countdown
  kMergedWithPrevious,  ///< the-, final-, -, countdown
  kMergedWithNext,      ///< the, -final, -, -countdown
  kContiguous,          ///< the, -, final, --, countdown
};

SplitBehaviour parse_behaviour(const JsonView& view) {
  const std::string& name = view.string();
  if (name == "Removed" || name == "removed") return SplitBehaviour::kRemoved;
  if (name == "Isolated" || name == "isolated") return SplitBehaviour::kIsolated;
  if (name == "MergedWithPrevious" || name == "merged_with_previous") return SplitBehaviour::kMergedWithPrevious;
  if (name == "MergedWithNext" || name == "merged_with_next") return SplitBehaviour::kMergedWithNext;
  if (name == "Contiguous" || name == "contiguous") return SplitBehaviour::kContiguous;
  view.fail("Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous");
}

/// Takes consecutive stretches of one piece, each a delimiter or not, and hands out the words.
class Splitter {
 public:
  Splitter(const Piece& source, SplitBehaviour behaviour, PieceSink sink)
      : source_(source), behaviour_(behaviour), sink_(sink) {}
  void add(size_t begin, size_t end, bool delimiter);
  /// Hands out what is still held back. Call once, at the end.
  void finish() {
    if (holding_) sink_(source_.part(begin_, end_));
    holding_ = false;
  }

 private:
  const Piece& source_;
  SplitBehaviour behaviour_;
  PieceSink sink_;
  bool holding_ = false;        // a word [begin_, end_) that the next stretch may extend
  bool was_delimiter_ = false;  // the last stretch
  size_t begin_ = 0, end_ = 0;
};

void Splitter::add(size_t begin, size_t end, bool delimiter) {
  bool extends = false;
  switch (behaviour_) {
    case SplitBehaviour::kRemoved:
      if (!delimiter) sink_(source_.part(begin, end));
      return;
    case SplitBehaviour::kIsolated:
      return sink_(source_.part(begin, end));
    case SplitBehaviour::kContiguous:
      extends = holding_ && delimiter == was_delimiter_;
      break;
    // A delimiter joins the stretch before it unless that is a delimiter too.
    case SplitBehaviour::kMergedWithPrevious:
      extends = holding_ && delimiter && !was_delimiter_;
      break;
    // A stretch joins the delimiter before it; of several delimiters, only the last finds one to join.
    case SplitBehaviour::kMergedWithNext:
      extends = holding_ && !delimiter && was_delimiter_;
      break;
  }
  if (!extends) {
    finish();
    holding_ = true;
    begin_ = begin;
  }
  end_ = end;
  was_delimiter_ = delimiter;
}

// Splits at what next(begin, end) finds, one after the other, until it is false.
template <class Next>
void split(const Piece& source, SplitBehaviour behaviour, bool invert, PieceSink sink, Next next) {
  Splitter splitter(source, behaviour, sink);
  size_t begin = 0, end = 0, done = 0;
  while (next(begin, end)) {
    if (done != begin) splitter.add(done, begin, invert);
    splitter.add(begin, end, !invert);
    done = end;
  }
  if (done != source.text.size()) splitter.add(done, source.text.size(), invert);
  splitter.finish();
}

// Splits at the matches of a pattern.
PreTokenizer split_at(std::shared_ptr<const Regex> pattern, SplitBehaviour behaviour, bool invert) {
  return [=](const Piece& source, PieceSink sink) {
    Regex::Scan scan(*pattern, source.text);
    split(source, behaviour, invert, sink, [&scan](size_t& begin, size_t& end) { return scan.next(begin, end); });
  };
}

// Splits at single characters of a class.
PreTokenizer split_at_characters(bool (*matches)(char32_t), SplitBehaviour behaviour) {
  return [=](const Piece& source, PieceSink sink) {
    const std::string_view text = source.text;
    split(source, behaviour, false, sink, [=, at = size_t{0}](size_t& begin, size_t& end) mutable {
      while (at < text.size()) {
        begin = at;
        end = at += utf8_length(text[begin]);
        if (matches(decode_utf8(text.data() + begin))) return true;
      }
      return false;
    });
  };
}

// As in a normalizer.
PreTokenizer changed(Normalizer step) {
  return [step = std::move(step)](const Piece& source, PieceSink sink) {
    PieceBuilder builder;
    sink(step(source, builder) ? builder.piece() : source);
  };
}

// Puts a prefix in front of text that does not start with it yet.
PreTokenizer add_prefix(const std::string& prefix, bool only_at_start) {
  return changed([=, put = make_prepend(prefix)](const Piece& source, PieceBuilder& result) {
    return !source.text.starts_with(prefix) && !(only_at_start && source.original_begin(0) != 0) && put(source, result);
  });
}

void add_metaspace(const JsonView& view, std::vector<PreTokenizer>& steps) {
  const std::string replacement = one_character(view.at("replacement"));
  std::string scheme = view.string_or("prepend_scheme", "always");
  if (!view.boolean_or("add_prefix_space", true)) scheme = "never";
  if (scheme != "always" && scheme != "first" && scheme != "never")
    view.at("prepend_scheme").fail("always, first or never");
  steps.push_back(changed(make_replace(std::make_shared<const Regex>(Regex::literal(" ")), replacement)));
  if (scheme != "never") steps.push_back(add_prefix(replacement, scheme == "first"));
  if (view.boolean_or("split", true))
    steps.push_back(
        split_at(std::make_shared<const Regex>(Regex::literal(replacement)), SplitBehaviour::kMergedWithNext, false));
}

// All steps but the mapping of bytes.
void add_byte_level(const JsonView& view, std::vector<PreTokenizer>& steps) {
  if (view.boolean_or("add_prefix_space", true)) steps.push_back(add_prefix(" ", false));
  if (view.boolean_or("use_regex", true))
    steps.push_back(
        split_at(std::make_shared<const Regex>(kGpt2Pattern, view.where()), SplitBehaviour::kIsolated, false));
}

void add_step(const JsonView& view, const std::string& type, std::vector<PreTokenizer>& steps) {
  if (type == "Split") {
    auto pattern = make_pattern(view.at("pattern"));
    const SplitBehaviour behaviour = parse_behaviour(view.at("behavior"));
    if (pattern) steps.push_back(split_at(std::move(pattern), behaviour, view.boolean_or("invert", false)));
  } else if (type == "Digits") {
    const bool single = view.boolean_or("individual_digits", false);
    steps.push_back(split_at_characters(&is_numeric, single ? SplitBehaviour::kIsolated : SplitBehaviour::kContiguous));
  } else if (type == "Punctuation") {
    const SplitBehaviour behaviour =
        view.has("behavior") ? parse_behaviour(view.at("behavior")) : SplitBehaviour::kIsolated;
    steps.push_back(split_at_characters(&is_punctuation, behaviour));
  } else if (type == "Metaspace") {
    add_metaspace(view, steps);
  } else if (type == "Whitespace") {
    // \w+|[^\w\s]+ with the \w of Rust, which is is_word() and not that of Oniguruma.
    steps.push_back(split_at_characters(&is_white_space, SplitBehaviour::kRemoved));
    steps.push_back(split_at_characters(&is_word, SplitBehaviour::kContiguous));
  } else if (type == "WhitespaceSplit") {
    steps.push_back(split_at_characters(&is_white_space, SplitBehaviour::kRemoved));
  } else {
    view.unsupported("the pre-tokenizer \"" + shorten(type) + "\"",
                     "ByteLevel, Split, Digits, Punctuation, Metaspace, Whitespace, WhitespaceSplit or Sequence");
  }
}

void run_steps(const PreTokenizerChain& chain, size_t step, const Piece& piece, PieceSink sink) {
  if (piece.text.empty()) return;
  if (step == chain.steps.size()) return sink(piece);
  chain.steps[step](piece, [&](const Piece& part) { run_steps(chain, step + 1, part, sink); });
}

}  // namespace

std::shared_ptr<const Regex> make_pattern(const JsonView& view) {
  if (!view.has("String")) {
    const JsonView regex = view.at("Regex");
    return std::make_shared<const Regex>(regex.string(), regex.where());
  }
  const std::string& text = view.at("String").string();
  return text.empty() ? nullptr : std::make_shared<const Regex>(Regex::literal(text));
}

std::string one_character(const JsonView& view) {
  const std::string& text = view.string();
  if (text.empty() || utf8_length(text[0]) != text.size()) view.fail("one character");
  return text;
}

PreTokenizerChain make_pre_tokenizers(const JsonView& pre_tokenizer) {
  PreTokenizerChain chain;
  size_t mappings = 0, after_last = 0;
  for_each_step(pre_tokenizer, "pretokenizers", [&](const JsonView& view, const std::string& type) {
    if (type != "ByteLevel") return add_step(view, type, chain.steps);
    add_byte_level(view, chain.steps);
    chain.steps.push_back(changed(byte_level));
    ++mappings;
    after_last = chain.steps.size();
  });
  if (mappings == 1 && after_last == chain.steps.size()) {
    chain.steps.pop_back();
    chain.byte_level = true;
  }
  return chain;
}

void pre_tokenise(const PreTokenizerChain& chain, const Piece& source, PieceSink sink) {
  run_steps(chain, 0, source, sink);
}

}  // namespace emend::models::detail
