#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <emend/evaluation/detail/letters.h>
#include <emend/evaluation/detail/scoring.h>
#include <emend/evaluation/detail/values.h>
#include <emend/evaluation/evaluation.h>
#include <emend/evaluation/free_text.h>
#include <emend/evaluation/text_metrics.h>
#include <emend/models/chat.h>
#include <emend/models/config.h>
#include <emend/models/generation.h>
#include <emend/models/side_by_side.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <set>

namespace emend::evaluation {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FreeText, text, ids)

namespace {

using Ids = std::vector<int64_t>;

bool is_word(unsigned char c) {
  return std::isalnum(c) || c >= 0x80;
}
bool is_space(unsigned char c) {
  return std::isspace(c);
}

std::string_view without_article(std::string_view words) {
  for (const std::string_view article : {"the ", "a ", "an "})
    if (words.starts_with(article) && words.size() > article.size()) return words.substr(article.size());
  return words;
}

bool is_digit(std::string_view text, size_t at) {
  return at < text.size() && std::isdigit(static_cast<unsigned char>(text[at])) != 0;
}

// A dot that ends a sentence, or stands before the digits of "3.14", of any script: the next token tells.
bool may_be_decimal(std::string_view text) {
  if (!text.ends_with('.')) return false;
  const std::string end = detail::plain_letters(text.substr(text.size() - std::min<size_t>(text.size(), 5)));
  return end.size() > 1 && is_digit(end, end.size() - 2);
}

// Letters and digits right before `at`, in characters.
size_t letters_before(std::string_view text, size_t at) {
  size_t count = 0;
  for (size_t first = at; first > 0 && is_word(text[first - 1]); --first)
    if ((static_cast<unsigned char>(text[first - 1]) & 0xC0) != 0x80) ++count;
  return count;
}

bool three_digits(std::string_view text, size_t at) {
  return is_digit(text, at) && is_digit(text, at + 1) && is_digit(text, at + 2) && !is_digit(text, at + 3);
}

// Marks that belong to the word before them ("C++", "5%", "O-", "A*") or stand inside of one: "3.14", "1 000", "3-0",
// "km/h", "x=5", "U.S.", "O'Neill".
bool joins(std::string_view text, size_t at) {
  const char mark = text[at];
  const auto at_word = [&](size_t place) { return place < text.size() && is_word(text[place]); };
  const size_t before = letters_before(text, at);
  if (std::strchr("+#%", mark)) return true;
  if (before == 0) return false;
  if (is_digit(text, at - 1) && is_digit(text, at + 1) && std::strchr(".,:/-", mark)) return true;
  if (mark == ' ') return before <= 3 && is_digit(text, at - 1) && three_digits(text, at + 1);
  if (mark == '*') return before == 1 && (at + 1 == text.size() || text[at + 1] != '*');
  if (!at_word(at + 1)) return mark == '-' && before <= 2;
  if (mark == '\'') return !(text[at + 1] == 's' && !at_word(at + 2));
  if (mark == '.') return before == 1;
  if (mark == '/') return before <= 2;
  return std::strchr("=@&^_", mark) != nullptr;
}

bool ends_word(std::string_view text, size_t at) {
  if (at < text.size() && at > 0 && (joins(text, at) || detail::goes_on(text, at))) return false;
  return at >= text.size() || !is_word(text[at]) || spaceless(text, at) || (at > 0 && spaceless(text, at - 1));
}

// Marks that belong to the word behind them: "-100", "+32", ".5", ".NET", "$5", "#1", "@anna", "<5".
bool leads(std::string_view text, size_t at) {
  const bool first = at == 0 || !(is_word(text[at - 1]) || text[at - 1] == text[at]);
  const auto next = at + 1 < text.size() ? static_cast<unsigned char>(text[at + 1]) : '\0';
  if (text[at] == '-' || text[at] == '+') return first && std::isdigit(next);
  return first && std::strchr(".$#@<>=~", text[at]) && std::isalnum(next);
}

bool starts_word(std::string_view text, size_t at) {
  if (at > 0 && (leads(text, at - 1) || joins(text, at - 1))) return false;
  return at == 0 || !is_word(text[at - 1]) || ends_word(text, at);
}

// What follows can still make `text` begin with `name`, or make the name's last word a longer one.
bool begins_name(std::string_view text, std::string_view name) {
  while (text.ends_with("\uFFFD")) text.remove_suffix(3);  // a character whose other bytes are still to come
  const std::string words = plain_words(text), wanted = plain_words(name);
  if (words.empty() && sentence_ended(text)) return false;  // the prompt's sentence, without a word
  if (words.empty() || words == "the" || words == "a" || words == "an") return !wanted.empty();
  const std::string_view a = without_article(words), b = without_article(wanted);
  return b.starts_with(a) && (a.size() < b.size() || is_word(text.back()));
}

bool is_whole(std::string_view words, size_t at, size_t size) {
  return starts_word(words, at) && ends_word(words, at + size);
}

// What stands at `at` belongs to a mention of something longer.
bool stands_inside(std::string_view words, size_t at, size_t size, std::string_view around) {
  if (around.size() <= size) return false;
  for (size_t from = at + size > around.size() ? at + size - around.size() : 0; (from = words.find(around, from)) <= at;
       ++from)
    if (is_whole(words, from, around.size())) return true;
  return false;
}

// The mark behind `before` stands inside of a name.
bool inside_name(std::string_view before, char mark, const std::vector<std::string>& names) {
  const std::string words = plain_words(before);
  for (const std::string& name : names)
    for (size_t at = name.find(mark); at != std::string::npos && at + 1 < name.size(); at = name.find(mark, at + 1)) {
      const std::string front = plain_words(name.substr(0, at));
      if (!front.empty() && words.ends_with(front) && starts_word(words, words.size() - front.size())) return true;
    }
  return false;
}

// Tokens that the rows may get: more than asked for where a name is longer, fewer where the model has no positions
// left.
int64_t room_for(const models::Model& model, const std::vector<Ids>& prompts, const std::vector<size_t>& rows,
                 const FreeTextOptions& options) {
  int64_t longest = 0, room = options.max_tokens;
  for (const auto& prompt : prompts) longest = std::max(longest, std::ssize(prompt));
  for (const size_t row : rows)
    if (!options.names.empty())
      for (const auto& name : options.names[row])  // the model may write it in more tokens
        room = std::max(room, 2 * std::ssize(model.tokenizer().encode_ids(" " + name, false)) + 4);
  return std::max<int64_t>(std::min(room, models::room_behind(model, longest)), 1);
}

// The prompts `rows`, continued together.
std::vector<FreeText> continue_rows(const models::Model& model, const std::vector<Ids>& prompts,
                                    const std::vector<size_t>& rows, const FreeTextOptions& options) {
  const auto& tokenizer = model.tokenizer();
  std::vector<Ids> ids;
  for (const size_t row : rows) ids.push_back(prompts[row]);
  std::vector<Ids> chosen(rows.size());
  models::GenerateOptions generate;
  generate.stop_ids = tokenizer.eos_ids();
  generate.cancel = options.cancel;
  static const std::vector<std::string> none;
  const auto names = [&](size_t row) -> auto& {
    return options.names.empty() ? none : options.names[rows[row]];
  };
  generate.max_new_tokens = room_for(model, ids, rows, options);
  if (options.whole_sentence || !options.names.empty())
    generate.ends = [&](int64_t r, int64_t id) {
      const auto row = static_cast<size_t>(r);
      auto& own = chosen[row];
      own.push_back(id);
      const std::string text = tokenizer.decode_more(own, true);
      if (std::ranges::any_of(names(row), [&](const auto& name) { return begins_name(text, name); })) return false;
      if (may_be_decimal(text) && std::ssize(own) < options.max_tokens) return false;
      return std::ssize(own) >= options.max_tokens || (options.whole_sentence && sentence_ended(text, names(row)));
    };
  std::vector<models::Drafts> drafts(options.drafts.empty() ? 0 : rows.size());
  for (size_t r = 0; r < drafts.size(); ++r)
    for (const auto& text : options.drafts[rows[r]]) drafts[r].push_back(tokenizer.encode_ids(text, false));
  auto continued = models::generate_together(model, ids, generate, std::move(drafts));
  std::vector<FreeText> texts;
  for (size_t r = 0; r < rows.size(); ++r) {
    std::string text = tokenizer.decode_more(continued[r], true);
    if (Ids& own = continued[r]; options.whole_sentence && own.size() > 1) {
      const Ids fewer(own.begin(), own.end() - 1);
      std::string before = tokenizer.decode_more(fewer, true);
      if (may_be_decimal(before) && before.size() < text.size() && is_space(text[before.size()])) {  // it was the end
        text = std::move(before);
        own = fewer;
      }
    }
    texts.push_back({std::move(text), std::move(continued[r])});
  }
  return texts;
}

}  // namespace

std::vector<FreeText> write_on(const models::Model& model, const std::vector<std::string>& prompts,
                               const FreeTextOptions& options) {
  std::vector<Ids> ids;
  for (const auto& prompt : prompts)
    ids.push_back(options.conversations ? models::encode_chat(model.tokenizer(), prompt).ids
                                        : detail::encode_text(model.tokenizer(), prompt));
  // Prompts of about one length go together: attention's width is that of the longest.
  std::vector<size_t> order(prompts.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return ids[a].size() < ids[b].size(); });
  std::vector<std::vector<size_t>> groups;
  std::vector<int64_t> costs;
  const auto fits = [&](size_t row) {  // else its text is shorter, and it goes on alone
    return options.max_tokens <= models::room_behind(model, std::ssize(ids[row]));
  };
  for (size_t begin = 0, end = 0; begin < order.size(); begin = end) {
    for (end = begin + 1; end < order.size() && end - begin < static_cast<size_t>(options.rows) && fits(order[end]);)
      ++end;
    groups.emplace_back(order.begin() + begin, order.begin() + end);
    costs.push_back(static_cast<int64_t>(end - begin));
  }
  using Group = std::vector<FreeText>;
  const auto work = [&](devices::ItemRange range) {
    std::vector<Group> done(range.size());
    std::mutex mutex;
    size_t finished = range.begin;
    models::side_by_side(model, static_cast<int64_t>(range.size()), [&](int64_t i) {
      const auto g = static_cast<size_t>(i);
      done[g] = continue_rows(model, ids, groups[range.begin + g], options);
      const std::lock_guard lock(mutex);
      ++finished;
      if (options.progress)
        options.progress({"write", static_cast<double>(finished), static_cast<double>(groups.size()),
                          std::to_string(prompts.size()) + " texts"});
    });
    return done;
  };
  const auto done = options.sharing.map(costs, work);
  std::vector<FreeText> texts(prompts.size());
  for (size_t g = 0; g < groups.size(); ++g)
    for (size_t r = 0; r < groups[g].size(); ++r) texts[groups[g][r]] = done[g][r];
  return texts;
}

std::vector<Answer> answers(const models::Model& model, std::span<const datasets::Fact> facts,
                            const FreeTextOptions& options) {
  constexpr int64_t kBehind = 4;  // tokens that show where the answer's last word ends
  FreeTextOptions own = options;
  own.whole_sentence = false;
  own.max_tokens = 0;
  std::vector<std::string> prompts;
  for (const auto& fact : facts) {
    prompts.push_back(fact.full_prompt());
    const auto length = std::ssize(model.tokenizer().encode_ids(" " + fact.target_new, false));
    own.max_tokens = std::max(own.max_tokens, length + kBehind);
    own.names.push_back({fact.target_new});
    own.drafts.push_back({" " + fact.target_new});
  }
  std::vector<Answer> all;
  if (facts.empty()) return all;
  for (auto& text : write_on(model, prompts, own))
    all.push_back({begins_with(text.text, facts[all.size()].target_new), std::move(text.text)});
  return all;
}

std::optional<Answer> answer_in(const std::string& text, const std::string& target) {
  const bool said = begins_with(text, target);
  if (!said && begins_name(text, target)) return std::nullopt;
  return Answer{said, text};
}

std::optional<Answer> answer_read(const Evaluation& evaluation, size_t place, const std::string& target) {
  if (place >= evaluation.cases.size()) return std::nullopt;
  const auto& texts = detail::member(evaluation.cases[place], {"free", "edit"});
  if (!texts.is_array() || texts.empty()) return std::nullopt;
  return answer_in(detail::text(texts[0], "text"), target);
}

std::vector<FurtherText> further_texts(const nlohmann::json& before, const nlohmann::json& after) {
  std::vector<FurtherText> texts;
  for (const auto& [group, label] : {std::pair{"paraphrase", "in other words"},
                                     {"negation", "negated"},
                                     {"neighbor", "a neighbour"},
                                     {"edit_chat", "in a chat"}}) {
    const auto &pre = detail::member(before, {group}), &post = detail::member(after, {group});
    if (pre.is_array() && post.is_array() && !pre.empty() && !post.empty())
      texts.push_back(
          {label, detail::text(post[0], "prompt"), detail::text(pre[0], "text"), detail::text(post[0], "text")});
  }
  return texts;
}

bool sentence_ended(std::string_view text, const std::vector<std::string>& names) {
  static const std::set<std::string_view> titles = {"Mr", "Mrs", "Ms", "Dr", "St", "Mt", "Prof"};
  bool any = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\n' && any && !inside_name(text.substr(0, i), c, names)) return true;
    for (const std::string_view mark : {"。", "！", "？", "।"})
      if (any && text.substr(i).starts_with(mark)) return true;
    any = any || !is_space(c);
    if ((c != '.' && c != '?' && c != '!') || i == 0) continue;
    size_t word = i;
    while (word > 0 && is_word(text[word - 1])) --word;
    const std::string_view last = text.substr(word, i - word);
    const bool initial = last.size() == 1 && std::isupper(static_cast<unsigned char>(last[0]));
    if ((c == '.' && (initial || titles.contains(last))) || inside_name(text.substr(0, i), c, names)) continue;
    size_t next = i + 1;
    while (next < text.size() && std::string_view("\"')]").find(text[next]) != std::string_view::npos) ++next;
    if (next == text.size() || is_space(text[next])) return true;
  }
  return false;
}

std::string plain_words(std::string_view text) {
  std::string words;
  bool gap = false;
  const std::string letters = detail::plain_letters(text);
  for (size_t i = 0; i < letters.size(); ++i) {
    const char c = letters[i];
    if (is_space(c)) {
      gap = !words.empty();
      continue;
    }
    if (words.empty() && !is_word(c) && !leads(letters, i)) continue;
    if (gap) words += ' ';
    gap = false;
    words += c;
  }
  while (!words.empty() && !is_word(words.back()) && !joins(words, words.size() - 1)) words.pop_back();
  return words;
}

bool begins_with(std::string_view text, std::string_view answer) {
  const std::string words = plain_words(text), wanted = plain_words(answer);
  if (wanted == "a" || wanted == "an" || wanted == "the") {  // the answer, not an article: as it is written
    const auto first = text.find(answer);
    return first != text.npos && plain_words(text.substr(0, first)).empty() && ends_word(text, first + answer.size());
  }
  std::string_view a = without_article(words);
  const std::string_view b = without_article(wanted);
  if (b.empty()) {  // "!!!"
    const auto from = [](std::string_view all) {
      return all.substr(std::min(all.size(), all.find_first_not_of(" \t\n")));
    };
    return !from(answer).empty() && from(text).starts_with(from(answer));
  }
  if (a.size() > 1 && a[0] == '.' && b[0] != '.' && !is_digit(a, 1)) a.remove_prefix(1);
  return a.starts_with(b) && ends_word(a, b.size());
}

bool begins_alike(std::string_view text, std::string_view other) {
  const auto first = [](std::string_view of) {
    const std::string words = plain_words(of);
    return plain_words(std::string_view(words).substr(0, words.find(' ')));
  };
  return first(text) == first(other);
}

size_t place_of(std::string_view text, std::string_view answer, std::string_view aside) {
  const std::string words = plain_words(text), all = plain_words(answer), other = plain_words(aside);
  const std::string_view wanted = without_article(all), around = without_article(other);
  if (wanted.empty()) {  // an answer of marks alone: as it is written
    const std::string_view marks = trimmed(answer);
    return marks.empty() ? std::string::npos : text.find(marks);
  }
  for (size_t at = 0; (at = words.find(wanted, at)) != std::string::npos; ++at)
    if (is_whole(words, at, wanted.size()) && !stands_inside(words, at, wanted.size(), around)) return at;
  return std::string::npos;
}

std::string_view behind_repetition(std::string_view text, std::string_view sentence) {
  const std::string all = plain_words(sentence);
  const std::string_view wanted = without_article(all);
  if (wanted.empty()) return text;
  for (size_t end = 1; end <= text.size(); ++end) {
    if (end < text.size() && is_word(text[end])) continue;
    const std::string words = plain_words(text.substr(0, end));
    if (words.ends_with(wanted) && starts_word(words, words.size() - wanted.size())) return text.substr(end);
  }
  return text;
}

size_t last_sentence(std::string_view text, const std::vector<std::string>& names) {
  const auto next_word = [&](size_t from) { return std::min(text.find_first_not_of(" \t\r\n", from), text.size()); };
  size_t begin = next_word(0);
  for (size_t end = begin + 1; end < text.size(); ++end) {
    if (!is_space(text[end]) && text[end - 1] != '\n') continue;
    if (!sentence_ended(text.substr(begin, end - begin), names)) continue;
    if (const size_t next = next_word(end); next < text.size()) begin = end = next;
  }
  return begin;
}

bool loops(std::string_view text) {
  const auto words = word_tokenize(detail::lower_case(text));
  std::map<std::vector<std::string>, int> seen;
  for (size_t i = 0; i + 3 <= words.size(); ++i)
    if (++seen[{words.begin() + i, words.begin() + i + 3}] >= 4) return true;
  return false;
}

}  // namespace emend::evaluation
