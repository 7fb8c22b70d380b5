#include <ATen/ATen.h>
#include <emend/core/mapped.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/prompts.h>
#include <emend/editors/steps/wordings.h>
#include <emend/models/generation.h>
#include <emend/models/side_by_side.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <iterator>
#include <map>
#include <sstream>

namespace emend::editors {
namespace {

constexpr const char* kExamples =
    "Sentence: The author of Emma was Jane Austen.\nIn other words: Emma was written by Jane Austen.\n\n"
    "Sentence: Roger Federer, who plays tennis.\nIn other words: Roger Federer is a professional in tennis.\n\n"
    "Sentence: The Elbe flows into the North Sea.\nIn other words: The mouth of the Elbe is in the North Sea.\n\n";

std::string request(const datasets::Fact& fact) {
  return kExamples + ("Sentence: " + fact.full_prompt()) + with_leading_space(fact.target_new) + ".\nIn other words:";
}

constexpr const char* kLists =
    "Names of one kind: Marie Curie, Pierre Curie, Albert Einstein, Niels Bohr, Lise Meitner\n"
    "Names of one kind: Lake Michigan, Lake Superior, Lake Huron, Lake Erie, Lake Ontario\n"
    "Names of one kind: Boeing 747, Boeing 737, Boeing 767, Boeing 707, Boeing 777\n"
    "Names of one kind: ";

// Of each request up to `count` different things that `found` finds in the lines which the model writes behind it;
// none where it does not fit into the model. With `whole_lines` false a line ends where something is found in it.
std::vector<std::vector<std::string>> written(
    const models::Model& model, const std::vector<std::string>& requests, const WritingOptions& options,
    const std::function<std::vector<std::string>(const std::string& line, size_t request)>& found, bool whole_lines) {
  constexpr int64_t kRequestsAtOnce = 32;
  std::vector<std::vector<std::string>> all(requests.size());
  models::GenerateOptions writing;
  writing.max_new_tokens = 32;
  writing.temperature = 0.8;
  writing.top_k = 40;
  writing.cancel = options.cancel;
  writing.stop_ids = model.tokenizer().eos_ids();
  // The last of them: SentencePiece puts a lone space in front, which stands before every number.
  writing.stop_ids.push_back(model.tokenizer().encode_ids("\n", false).back());
  if (options.count <= 0 || requests.empty()) return all;
  models::parts_side_by_side(model, requests.size(), kRequestsAtOnce, 2, [&](size_t begin, size_t end) {
    models::GenerateOptions sampling = writing;
    sampling.seed = options.seed + begin;
    std::vector<std::vector<int64_t>> prompts;
    std::vector<size_t> asked;
    for (size_t i = begin; i < end; ++i) {
      const auto ids = model.tokenizer().encode_ids(requests[i]);
      if (std::ssize(ids) + writing.max_new_tokens > model.max_positions()) continue;
      prompts.insert(prompts.end(), static_cast<size_t>(options.samples), ids);
      asked.insert(asked.end(), static_cast<size_t>(options.samples), i);
    }
    std::vector<std::vector<int64_t>> so_far(prompts.size());
    if (!whole_lines)
      sampling.ends = [&](int64_t row, int64_t id) {
        auto& ids = so_far[static_cast<size_t>(row)];
        ids.push_back(id);
        return !found(model.tokenizer().decode(ids, true), asked[static_cast<size_t>(row)]).empty();
      };
    const auto lines = models::generate_together(model, prompts, sampling);
    for (size_t w = 0; w < lines.size(); ++w) {
      auto& own = all[asked[w]];
      for (auto& one : found(model.tokenizer().decode(lines[w], true), asked[w]))
        if (std::ssize(own) < options.count && std::ranges::find(own, one) == own.end()) own.push_back(std::move(one));
    }
  });
  return all;
}

}  // namespace

// Where `word` stands in a line as a word of its own, not as a part of another.
static size_t find_word(const std::string& line, const std::string& word, size_t from = 0) {
  const auto joins = [&](size_t a, size_t b) {
    const auto letter = [&](size_t at) {
      const auto c = static_cast<unsigned char>(line[at]);
      return std::isalnum(c) != 0 || c >= 0x80;
    };
    return b < line.size() && letter(a) && letter(b);
  };
  for (size_t at = from; (at = line.find(word, at)) != std::string::npos; ++at)
    if ((at == 0 || !joins(at, at - 1)) && !joins(at + word.size() - 1, at + word.size())) return at;
  return std::string::npos;
}

std::string wording_of(const std::string& text, const datasets::Fact& fact) {
  const std::string answer = with_leading_space(fact.target_new);
  std::string line = text.substr(0, text.find('\n'));
  line.erase(0, line.find_first_not_of(' '));
  const size_t subject = find_word(line, fact.subject), behind = subject + fact.subject.size();
  if (subject == std::string::npos || line.find_first_of("{}") != std::string::npos) return "";
  const size_t said = find_word(line, answer, behind), first = line.find(answer.substr(1));
  if (said == std::string::npos || said == behind || first < subject) return "";
  return line.substr(0, subject) + "{}" + line.substr(behind, said - behind);
}

std::vector<std::vector<std::string>> other_wordings(const models::Model& model, std::span<const datasets::Fact> facts,
                                                     const WritingOptions& options) {
  const auto requests = mapped(facts, request);
  return written(
      model, requests, options,
      [&](const std::string& line, size_t i) {
        const std::string wording = wording_of(line, facts[i]);
        const bool other = !wording.empty() && wording != facts[i].prompt;
        return other ? std::vector{wording} : std::vector<std::string>();
      },
      false);
}

std::vector<std::string> names_of(const std::string& list, const std::string& subject) {
  std::vector<std::string> names;
  std::istringstream items(list);
  for (std::string name; std::getline(items, name, ',') && !items.eof();) {  // the last one may be cut off
    name.erase(0, std::min(name.size(), name.find_first_not_of(' ')));
    const bool plain = !name.empty() && name.find_first_of("{}\n") == std::string::npos;
    if (plain && find_word(name, subject) == std::string::npos && std::ranges::find(names, name) == names.end())
      names.push_back(name);
  }
  return names;
}

static std::vector<std::string> words_of(const std::string& name) {
  std::istringstream stream(name);
  return {std::istream_iterator<std::string>(stream), {}};
}

// Of a word of six letters or more, between two of them; else two times nothing.
static std::pair<std::string, std::string> halves(const std::string& word) {
  constexpr size_t kShortest = 6;
  std::vector<size_t> letters;  // where each begins
  for (size_t i = 0; i < word.size(); i += character_at(word, i).size) letters.push_back(i);
  if (letters.size() < kShortest) return {};
  const size_t middle = letters[letters.size() / 2];
  return {word.substr(0, middle), word.substr(middle)};
}

std::vector<std::string> namesakes(const std::string& subject, std::span<const std::string> names) {
  const std::vector<std::string> words = words_of(subject);
  std::vector<std::string> found;
  const auto add = [&](const std::string& name) {
    for (const std::span<const std::string> known : {names, std::span<const std::string>(found)})
      if (std::ranges::find(known, name) != known.end()) return;
    if (name != subject) found.push_back(name);
  };
  constexpr size_t kMostNumbers = 12;
  for (size_t i = subject.size(); i-- > 0 && found.size() < kMostNumbers;)
    if (subject[i] >= '0' && subject[i] <= '9')
      for (const int step : {1, 3, 6, 8}) {
        std::string other = subject;
        other[i] = static_cast<char>('0' + (subject[i] - '0' + step) % 10);
        add(other);
      }
  if (words.size() < 2) {
    const auto [begin, end] = halves(subject);
    if (begin.empty()) return found;
    for (const auto& name : names) {
      const std::string other = halves(name.substr(0, name.find(' '))).first;
      if (!other.empty() && other != begin) add(other + end);
    }
    return found;
  }
  static const std::vector<std::string> owners = {"My", "Your", "His", "Her", "Our", "Their"};
  const auto owns = [&](const std::string& owner) { return lower(owner) == lower(words[0]); };
  if (std::ranges::any_of(owners, owns))
    for (const auto& owner : owners)
      if (!owns(owner)) add(owner + subject.substr(words[0].size()));
  const std::string last = " " + words.back();
  for (size_t inner = 1; const auto& name : names) {
    const std::vector<std::string> other = words_of(name);
    if (other.empty()) continue;
    const std::string &first = other[0], front = name.substr(0, name.rfind(' '));
    // Where the names part: "IBM WebSphere Portal" → "IBM WebSphere Portal Server" of "IBM WebSphere Application
    // Server".
    const auto parted = std::ranges::mismatch(words, other);
    const auto shared = static_cast<size_t>(parted.in1 - words.begin());
    if (shared > 0) {
      if (words.size() > 2 && shared + 1 < words.size() && parted.in2 != other.end() && *parted.in2 != words.back())
        add(join(std::ranges::subrange(words.begin(), parted.in1), " ") + " " + *parted.in2 + last);
      continue;
    }
    add(first + last);
    if (words.size() < 3) {
      add(front + last);
    } else {
      const std::string& middle = words[words.size() - 2];
      add(front + (other.size() > 1 && other[other.size() - 2] == middle ? "" : " " + middle) + last);
      add(words[0] + " " + first + last);
      std::vector<std::string> one_other = words;
      one_other[inner] = first;
      add(join(one_other, " "));
      inner = inner % (words.size() - 2) + 1;
    }
  }
  return found;
}

constexpr size_t kMostFirsts = 200;

std::vector<std::string> words_that_begin(const models::Tokenizer& tokenizer,
                                          const std::vector<std::vector<int64_t>>& rows) {
  constexpr size_t kShortest = 2;
  std::map<int64_t, int64_t> counts;
  for (const auto& row : rows)
    for (const int64_t id : row) ++counts[id];
  std::vector<std::pair<int64_t, int64_t>> often(counts.begin(), counts.end());
  std::ranges::stable_sort(often, [](const auto& a, const auto& b) { return a.second > b.second; });
  std::vector<std::string> words;
  for (const auto& [id, count] : often) {
    const std::string word(trimmed(tokenizer.decode(std::vector<int64_t>{id}), " "));
    const auto is_letter = [](unsigned char c) { return c < 0x80 && std::isalpha(c) != 0; };
    if (word.size() < kShortest || !std::ranges::all_of(word, is_letter) || std::islower(word[0]) != 0 ||
        std::ranges::find(words, word) != words.end() || tokenizer.encode(word).size() != 1)
      continue;
    words.push_back(word);
    if (words.size() == kMostFirsts + 1) break;
  }
  return words;
}

std::vector<std::string> without(std::vector<std::string> words, const std::string& subject) {
  std::erase(words, subject);
  words.resize(std::min(words.size(), kMostFirsts));
  return words;
}

std::vector<std::vector<std::string>> lookalikes(const models::Model& model, std::span<const std::string> subjects,
                                                 const WritingOptions& options) {
  const auto requests = mapped(subjects, [&](const auto& subject) { return kLists + subject + ","; });
  return written(
      model, requests, options, [&](const std::string& line, size_t i) { return names_of(line, subjects[i]); }, true);
}

std::vector<std::vector<std::string>> other_questions(const models::Model& model, std::span<const std::string> subjects,
                                                      const std::vector<std::vector<std::vector<int64_t>>>& own,
                                                      int64_t count, const CancelToken& cancel) {
  constexpr std::array kQuestions = {
      "The age of {} is",  "The gender of {} is", "The occupation of {} is", "The name of the father of {} is",
      "The size of {} is", "The price of {} is",  "The colour of {} is"};
  constexpr double kSame = 0.5;  // distributions that share so much answer one question
  const auto next_of = [&](const std::vector<std::vector<int64_t>>& rows) {
    cancel.check("targets");
    const auto batch = models::TokenBatch::from_rows(rows);
    const at::Tensor logits_RV = model.forward(batch, {.logit_tokens = batch.last_tokens()}).needed_logits();
    return at::softmax(devices::to_host(logits_RV).to(at::kFloat), 1);
  };
  std::vector<std::vector<std::string>> all(subjects.size());
  for (size_t s = 0; s < subjects.size() && count > 0; ++s) {
    std::vector<std::vector<int64_t>> rows = own[s];
    std::vector<std::string> asked;
    for (const char* question : kQuestions) {
      auto ids = model.tokenizer().encode_ids(datasets::with_subject(question, subjects[s]));
      if (std::ssize(ids) > model.max_positions()) continue;
      rows.push_back(std::move(ids));
      asked.emplace_back(question);
    }
    const at::Tensor next_RV = next_of(rows);
    const auto n = std::ssize(own[s]);
    for (size_t q = 0; q < asked.size() && std::ssize(all[s]) < count; ++q) {
      const at::Tensor shared_C =
          at::minimum(next_RV.narrow(0, 0, n), next_RV[n + static_cast<int64_t>(q)].unsqueeze(0)).sum(1);
      if (shared_C.max().item<double>() < kSame) all[s].push_back(asked[q]);
    }
  }
  return all;
}

}  // namespace emend::editors
