// Words, and the entropy of their n-grams.
//
// The word rules are the Penn Treebank's as NLTK's word_tokenize applies them, in its order. NLTK first cuts the text
// into sentences with a trained model; here a sentence ends at a full stop, question or exclamation mark that is
// followed by white space and a capital, a digit or an opening quote, unless the word before the full stop is a known
// abbreviation or a single letter. The cut only decides whether that full stop is a word of its own.
#include <emend/core/error.h>
#include <emend/core/regex.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <emend/evaluation/detail/letters.h>
#include <emend/evaluation/text_metrics.h>
#include <utf8proc.h>
#include <Eigen/SparseCore>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <map>
#include <memory>
#include <set>

namespace emend::evaluation {
namespace {

struct Rule {
  Regex pattern;
  std::string replacement;
};

const std::vector<Rule>& rules_before_padding() {
  static const std::vector<Rule> rules = {
      // opening quotes
      {Regex("([«“‘„]|[`]+)"), " $1 "},
      {Regex("^\""), "``"},
      {Regex("(``)"), " $1 "},
      {Regex("([ (\\[{<])(\"|'{2})"), "$1 `` "},
      {Regex("(?i)(?<!\\w)(')(?!(?:re|ve|ll|m|t|s|d|n)\\b)(?=\\w)"), "$1 "},
      // punctuation
      {Regex("([^.])(\\.)([\\])}>\"'»”’ ]*+)\\s*$"), "$1 $2 $3 "},
      {Regex("([:,])([^\\d])"), " $1 $2"},
      {Regex("([:,])$"), " $1 "},
      {Regex("\\.{2,}"), " $0 "},
      {Regex("[;@#$%&]"), " $0 "},
      {Regex("[\\x{2012}-\\x{2015}]"), " $0 "},
      {Regex("([^.])(\\.)([\\])}>\"']*)\\s*$"), "$1 $2$3 "},
      {Regex("[?!]"), " $0 "},
      {Regex("([^'])' "), "$1 ' "},
      {Regex("[*]"), " $0 "},
      {Regex("[\\]\\[(){}<>]"), " $0 "},
      {Regex("--"), " -- "},
  };
  return rules;
}

const std::vector<Rule>& rules_after_padding() {
  static const std::vector<Rule> rules = {
      // closing quotes and clitics
      {Regex("([»”’])"), " $1 "},
      {Regex("''"), " '' "},
      {Regex("\""), " '' "},
      {Regex("\\s+"), " "},
      {Regex("([^' ])('[sS]|'[mM]|'[dD]|') "), "$1 $2 "},
      {Regex("([^' ])('ll|'LL|'re|'RE|'ve|'VE|n't|N'T) "), "$1 $2 "},
      // contractions
      {Regex("(?i)\\b(can)(not)\\b"), " $1 $2 "},
      {Regex("(?i)\\b(d)('ye)\\b"), " $1 $2 "},
      {Regex("(?i)\\b(gim)(me)\\b"), " $1 $2 "},
      {Regex("(?i)\\b(gon)(na)\\b"), " $1 $2 "},
      {Regex("(?i)\\b(got)(ta)\\b"), " $1 $2 "},
      {Regex("(?i)\\b(lem)(me)\\b"), " $1 $2 "},
      {Regex("(?i)\\b(more)('n)\\b"), " $1 $2 "},
      {Regex("(?i)\\b(wan)(na)(?=\\s)"), " $1 $2 "},
      {Regex("(?i) ('t)(is)\\b"), " $1 $2 "},
      {Regex("(?i) ('t)(was)\\b"), " $1 $2 "},
  };
  return rules;
}

bool is_abbreviation(std::string_view word) {
  static const std::set<std::string, std::less<>> known = {
      "mr",   "mrs", "ms",     "dr",   "prof", "sr",  "jr",  "st",  "gen",  "col", "lt",   "sgt", "capt",
      "rev",  "hon", "gov",    "sen",  "rep",  "inc", "ltd", "co",  "corp", "vs",  "etc",  "no",  "vol",
      "ed",   "est", "approx", "dept", "fig",  "jan", "feb", "mar", "apr",  "jun", "jul",  "aug", "sep",
      "sept", "oct", "nov",    "dec",  "u.s",  "u.k", "e.g", "i.e", "a.m",  "p.m", "ph.d", "d.c"};
  if (word.size() <= 1) return true;
  return known.count(detail::lower_case(word)) > 0;
}

/// Sentences of a text; together they are the text.
std::vector<std::string_view> sentences(std::string_view text) {
  std::vector<std::string_view> out;
  size_t begin = 0;
  const auto is_space = [](char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; };
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '.' && text[i] != '?' && text[i] != '!') continue;
    size_t end = i + 1;
    while (end < text.size() && std::string_view("\"')]}.?!").find(text[end]) != std::string_view::npos) ++end;
    if (end >= text.size() || !is_space(text[end])) continue;
    size_t next = end;
    while (next < text.size() && is_space(text[next])) ++next;
    if (next >= text.size()) break;
    const auto c = static_cast<unsigned char>(text[next]);
    const bool starts =
        (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '"' || c == '\'' || c == '(' || c >= 0x80;
    if (!starts) continue;
    if (text[i] == '.' && end == i + 1) {
      size_t word = i;
      while (word > begin && !is_space(text[word - 1])) --word;
      if (is_abbreviation(text.substr(word, i - word))) continue;
    }
    out.push_back(text.substr(begin, end - begin));
    begin = end;
    i = next - 1;
  }
  if (begin < text.size()) out.push_back(text.substr(begin));
  return out;
}

std::vector<std::string> tfidf_tokens(std::string_view text) {
  static const Regex words("\\b\\w\\w+\\b");
  return words.find_all(detail::lower_case(text));
}

using Vector = Eigen::SparseVector<double>;

/// Counts times idf, scaled to length 1.
Vector weigh(std::string_view text, const std::unordered_map<std::string, int64_t>& vocabulary,
             const std::vector<double>& idf) {
  std::map<int64_t, double> counts;
  for (const auto& token : tfidf_tokens(text))
    if (const auto at = vocabulary.find(token); at != vocabulary.end()) counts[at->second] += 1;
  Vector vector(static_cast<Eigen::Index>(idf.size()));
  for (const auto& [index, count] : counts) vector.insert(index) = count * idf[index];
  const double length = vector.norm();
  if (length > 0) vector /= length;
  return vector;
}

}  // namespace

std::vector<std::string> word_tokenize(std::string_view raw) {
  const std::string text = repair_utf8(raw);
  std::vector<std::string> words;
  for (std::string_view sentence : sentences(text)) {
    std::string line(trimmed(sentence));
    if (line.empty()) continue;
    for (const auto& rule : rules_before_padding()) line = rule.pattern.replace_all(line, rule.replacement);
    line = " " + line + " ";
    for (const auto& rule : rules_after_padding()) line = rule.pattern.replace_all(line, rule.replacement);
    static const Regex not_space("\\S+");
    for (auto& word : not_space.find_all(line)) words.push_back(std::move(word));
  }
  return words;
}

double ngram_entropy(const std::vector<std::string>& words, int n) {
  if (n <= 0 || words.size() < static_cast<size_t>(n)) return 0;
  std::map<std::string, int64_t> counts;
  const size_t total = words.size() - static_cast<size_t>(n) + 1;
  for (size_t i = 0; i < total; ++i) {
    std::string gram;
    for (int k = 0; k < n; ++k) gram += words[i + static_cast<size_t>(k)] + '\x1f';
    ++counts[gram];
  }
  double entropy = 0;
  for (const auto& [gram, count] : counts) {
    const double p = static_cast<double>(count) / static_cast<double>(total);
    entropy -= p * std::log2(p);
  }
  return entropy;
}

double weighted_ngram_entropy(std::string_view text) {
  const auto words = word_tokenize(text);
  return (2.0 / 3.0 * ngram_entropy(words, 2) + 4.0 / 3.0 * ngram_entropy(words, 3)) / 2;
}

double mean_ngram_entropy(const std::vector<std::string>& texts) {
  if (texts.empty()) return 0;
  double sum = 0;
  for (const auto& text : texts) sum += weighted_ngram_entropy(text);
  return sum / static_cast<double>(texts.size());
}

TfIdf::TfIdf(const std::vector<std::string>& documents) {
  std::map<std::string, int64_t> document_counts;  // sorted, so indices do not depend on the order of documents
  for (const auto& document : documents) {
    const auto tokens = tfidf_tokens(document);
    for (const auto& token : std::set<std::string>(tokens.begin(), tokens.end())) ++document_counts[token];
  }
  if (document_counts.empty())
    refuse({"reference texts", "no word in " + std::to_string(documents.size()) + " documents",
            "at least one word of two letters", "check the file with the reference texts"});
  const auto n = static_cast<double>(documents.size());
  for (const auto& [token, count] : document_counts) {
    vocabulary_.emplace(token, std::ssize(idf_));
    idf_.push_back(std::log((1 + n) / (1 + static_cast<double>(count))) + 1);
  }
}

double TfIdf::similarity(std::string_view a, std::string_view b) const {
  return weigh(a, vocabulary_, idf_).dot(weigh(b, vocabulary_, idf_));
}

namespace detail {
std::string lower_case(std::string_view text) {
  const std::string valid = repair_utf8(text);
  utf8proc_uint8_t* mapped = nullptr;
  const auto size = utf8proc_map_custom(
      reinterpret_cast<const utf8proc_uint8_t*>(valid.data()), static_cast<utf8proc_ssize_t>(valid.size()), &mapped,
      UTF8PROC_STABLE, [](utf8proc_int32_t point, void*) { return utf8proc_tolower(point); }, nullptr);
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(mapped, &std::free);
  return size < 0 ? valid : std::string(reinterpret_cast<char*>(mapped), static_cast<size_t>(size));
}

// The value of a digit of any script: they stand in tens, from 0 on.
static char digit_of(utf8proc_int32_t point) {
  char value = '0';
  while (value < '9' && utf8proc_category(point - 1) == UTF8PROC_CATEGORY_ND) {
    --point;
    ++value;
  }
  return value;
}

std::string plain_letters(std::string_view text) {
  static const std::map<utf8proc_int32_t, std::string_view> kSpecial = {
      {0x2212, "-"}, {0x2044, "/"},                 // minus; of ½
      {0x066A, "%"}, {0x066B, "."}, {0x066C, ","},  // Arabic
      {0xFE0E, ""},  {0xFE0F, ""}};                 // how an emoji is drawn
  const std::string mapped = lower_case(compatibility_form(text));
  std::string plain;
  utf8proc_int32_t point = 0;
  for (size_t at = 0; at < mapped.size();) {
    const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(mapped.data()) + at;
    const auto size =
        static_cast<size_t>(std::max<utf8proc_ssize_t>(1, utf8proc_iterate(bytes, mapped.size() - at, &point)));
    const auto category = utf8proc_category(point);
    const bool symbol = category == UTF8PROC_CATEGORY_SM || category == UTF8PROC_CATEGORY_SC;
    const bool picture = point >= 0x2190 && (category == UTF8PROC_CATEGORY_SO || category == UTF8PROC_CATEGORY_SK);
    if (const auto special = kSpecial.find(point); special != kSpecial.end())
      plain += special->second;
    else if (point >= 0x80 && category == UTF8PROC_CATEGORY_ND)
      plain += digit_of(point);
    else if (picture)
      plain += " " + mapped.substr(at, size) + " ";
    else if (point < 0x80 || category <= UTF8PROC_CATEGORY_NO || symbol)
      plain += mapped.substr(at, size);
    else if (category >= UTF8PROC_CATEGORY_ZS)
      plain += ' ';
    else
      plain += category == UTF8PROC_CATEGORY_PD                                       ? '-'
               : point == 0x2018 || point == 0x2019                                   ? '\''
               : category == UTF8PROC_CATEGORY_PI || category == UTF8PROC_CATEGORY_PF ? '"'
                                                                                      : ';';
    at += size;
  }
  return plain;
}

bool goes_on(std::string_view text, size_t at) {
  const auto katakana = [](char32_t point) { return point >= 0x30A1 && point <= 0x30FF && point != 0x30FB; };
  const char32_t point = point_at(text, at);
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(point));
  if (category >= UTF8PROC_CATEGORY_MN && category <= UTF8PROC_CATEGORY_ME) return true;
  size_t before = at;
  while (before > 0 && katakana(point) &&
         (point_at(text, before - 1) == 0x3099 || point_at(text, before - 1) == 0x309A))
    before -= 3;  // a voiced one
  return before > 0 && katakana(point) && katakana(point_at(text, before - 1));
}

bool is_question(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.remove_suffix(1);
  return std::ranges::any_of(std::array<std::string_view, 4>{"?", "？", "؟", "\u037E"},
                             [&](std::string_view mark) { return text.ends_with(mark); });
}
}  // namespace detail

}  // namespace emend::evaluation
