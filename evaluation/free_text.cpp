#include <emend/evaluation/detail/letters.h>
#include <emend/evaluation/detail/scoring.h>
#include <emend/evaluation/detail/values.h>
#include <emend/evaluation/evaluation.h>
#include <emend/evaluation/free_text.h>
#include <emend/evaluation/text_metrics.h>
#include <emend/models/generation.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

namespace emend::evaluation {
namespace {

using Ids = std::vector<int64_t>;

bool is_word(unsigned char c) {
  return std::isalnum(c) || c >= 0x80;
}
bool is_space(unsigned char c) {
  return std::isspace(c);
}

// Decoded as a whole, because some tokenizers drop the space in front of a text's first word.
std::string behind(const models::Tokenizer& tokenizer, const Ids& prompt, const Ids& continued) {
  Ids whole = prompt;
  whole.insert(whole.end(), continued.begin(), continued.end());
  std::string text = tokenizer.decode(whole, /*skip_special=*/true);
  const std::string front = tokenizer.decode(prompt, /*skip_special=*/true);
  return text.starts_with(front) ? text.substr(front.size()) : text;
}

// The prompts `rows`, continued together.
std::vector<FreeText> continue_rows(const models::Model& model, const std::vector<Ids>& prompts,
                                    const std::vector<size_t>& rows, const FreeTextOptions& options) {
  const auto& tokenizer = model.tokenizer();
  std::vector<Ids> ids;
  for (const size_t row : rows) ids.push_back(prompts[row]);
  std::vector<Ids> chosen(rows.size());
  models::GenerateOptions generate;
  generate.max_new_tokens = options.max_tokens;
  generate.stop_ids = tokenizer.eos_ids();
  generate.cancel = options.cancel;
  if (options.whole_sentence)
    generate.ends = [&](int64_t row, int64_t id) {
      auto& own = chosen[static_cast<size_t>(row)];
      own.push_back(id);
      return sentence_ended(behind(tokenizer, {ids[static_cast<size_t>(row)].back()}, own));
    };
  auto continued = models::generate(model, ids, generate);
  std::vector<FreeText> texts;
  for (size_t r = 0; r < rows.size(); ++r) {
    std::string text = behind(tokenizer, ids[r], continued[r]);
    texts.push_back({std::move(text), std::move(continued[r])});
  }
  return texts;
}

std::string pack(const std::vector<std::vector<FreeText>>& groups) {
  nlohmann::json all = nlohmann::json::array();
  for (const auto& group : groups) {
    auto& list = all.emplace_back(nlohmann::json::array());
    for (const auto& text : group) list.push_back({text.text, text.ids});
  }
  const auto bytes = nlohmann::json::to_msgpack(all);
  return {bytes.begin(), bytes.end()};
}

std::vector<std::vector<FreeText>> unpack(std::string_view bytes) {
  std::vector<std::vector<FreeText>> groups;
  for (const auto& list : nlohmann::json::from_msgpack(bytes.begin(), bytes.end())) {
    auto& group = groups.emplace_back();
    for (const auto& entry : list) group.push_back({entry.at(0).get<std::string>(), entry.at(1).get<Ids>()});
  }
  return groups;
}

std::string_view without_article(std::string_view words) {
  for (const std::string_view article : {"the ", "a ", "an "})
    if (words.starts_with(article) && words.size() > article.size()) return words.substr(article.size());
  return words;
}

bool ends_word(std::string_view text, size_t at) {
  return at >= text.size() || !is_word(static_cast<unsigned char>(text[at]));
}

}  // namespace

std::vector<FreeText> write_on(const models::Model& model, const std::vector<std::string>& prompts,
                               const FreeTextOptions& options) {
  std::vector<Ids> ids;
  for (const auto& prompt : prompts) ids.push_back(detail::encode_text(model.tokenizer(), prompt));
  // Prompts of about one length go together: attention's width is that of the longest.
  std::vector<size_t> order(prompts.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return ids[a].size() < ids[b].size(); });
  std::vector<std::vector<size_t>> groups;
  std::vector<int64_t> costs;
  for (size_t begin = 0; begin < order.size(); begin += static_cast<size_t>(options.rows)) {
    const size_t end = std::min(begin + static_cast<size_t>(options.rows), order.size());
    groups.emplace_back(order.begin() + static_cast<std::ptrdiff_t>(begin),
                        order.begin() + static_cast<std::ptrdiff_t>(end));
    costs.push_back(static_cast<int64_t>(end - begin));
  }
  const auto work = [&](devices::ItemRange range) {
    std::vector<std::vector<FreeText>> done;
    for (size_t g = range.begin; g < range.end; ++g) {
      done.push_back(continue_rows(model, ids, groups[g], options));
      if (options.progress)
        options.progress({"write", static_cast<double>(g + 1), static_cast<double>(groups.size()),
                          std::to_string(prompts.size()) + " texts"});
    }
    return done;
  };
  const auto done = options.sharing.map<std::vector<FreeText>>(costs, work, pack, unpack);
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
    const auto length = static_cast<int64_t>(model.tokenizer().encode_ids(" " + fact.target_new, false).size());
    own.max_tokens = std::max(own.max_tokens, length + kBehind);
  }
  std::vector<Answer> all;
  if (facts.empty()) return all;
  for (auto& text : write_on(model, prompts, own))
    all.push_back({begins_with(text.text, facts[all.size()].target_new), std::move(text.text)});
  return all;
}

std::optional<Answer> answer_in(const std::string& text, const std::string& target) {
  if (begins_with(text, target)) return Answer{true, text};
  const std::string words = plain_words(text), wanted = plain_words(target);
  if (without_article(wanted).starts_with(without_article(words))) return std::nullopt;
  return Answer{false, text};
}

std::optional<Answer> answer_read(const Evaluation& evaluation, size_t place, const std::string& target) {
  if (place >= evaluation.cases.size()) return std::nullopt;
  const auto& texts = detail::member(evaluation.cases[place], {"free", "edit"});
  if (!texts.is_array() || texts.empty()) return std::nullopt;
  return answer_in(detail::text(texts[0], "text"), target);
}

std::vector<FurtherText> further_texts(const nlohmann::json& before, const nlohmann::json& after) {
  std::vector<FurtherText> texts;
  for (const auto& [group, label] :
       {std::pair{"paraphrase", "in other words"}, {"negation", "negated"}, {"neighbor", "a neighbour"}}) {
    const auto &pre = detail::member(before, {group}), &post = detail::member(after, {group});
    if (pre.is_array() && post.is_array() && !pre.empty() && !post.empty())
      texts.push_back(
          {label, detail::text(post[0], "prompt"), detail::text(pre[0], "text"), detail::text(post[0], "text")});
  }
  return texts;
}

bool sentence_ended(std::string_view text) {
  bool any = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\n' && any) return true;
    any = any || !is_space(static_cast<unsigned char>(c));
    if ((c != '.' && c != '?' && c != '!') || i == 0) continue;
    size_t word = i;
    while (word > 0 && is_word(static_cast<unsigned char>(text[word - 1]))) --word;
    const std::string_view last = text.substr(word, i - word);
    const bool initial = c == '.' && last.size() == 1 && std::isupper(static_cast<unsigned char>(last[0]));
    if (initial) continue;
    size_t next = i + 1;
    while (next < text.size() && std::string_view("\"')]").find(text[next]) != std::string_view::npos) ++next;
    if (next == text.size() || is_space(static_cast<unsigned char>(text[next]))) return true;
  }
  return false;
}

std::string plain_words(std::string_view text) {
  std::string words;
  bool gap = false;
  for (const char c : detail::lower_case(detail::compatibility_form(text))) {
    if (is_space(static_cast<unsigned char>(c))) {
      gap = !words.empty();
      continue;
    }
    if (words.empty() && !is_word(static_cast<unsigned char>(c))) continue;
    if (gap) words += ' ';
    gap = false;
    words += c;
  }
  while (!words.empty() && !is_word(static_cast<unsigned char>(words.back()))) words.pop_back();
  return words;
}

bool begins_with(std::string_view text, std::string_view answer) {
  const std::string words = plain_words(text), wanted = plain_words(answer);
  const std::string_view a = without_article(words), b = without_article(wanted);
  return !b.empty() && a.starts_with(b) && ends_word(a, b.size());
}

size_t place_of(std::string_view text, std::string_view answer) {
  const std::string words = plain_words(text), all = plain_words(answer);
  const std::string_view wanted = without_article(all);
  if (wanted.empty()) return std::string::npos;
  for (size_t at = 0; (at = words.find(wanted, at)) != std::string::npos; ++at)
    if ((at == 0 || !is_word(static_cast<unsigned char>(words[at - 1]))) && ends_word(words, at + wanted.size()))
      return at;
  return std::string::npos;
}

bool loops(std::string_view text) {
  const auto words = word_tokenize(detail::lower_case(text));
  std::map<std::vector<std::string>, int> seen;
  for (size_t i = 0; i + 3 <= words.size(); ++i)
    if (++seen[{words.begin() + static_cast<std::ptrdiff_t>(i), words.begin() + static_cast<std::ptrdiff_t>(i) + 3}] >=
        4)
      return true;
  return false;
}

}  // namespace emend::evaluation
