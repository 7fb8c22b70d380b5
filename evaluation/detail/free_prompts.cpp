#include <emend/core/text.h>
#include <emend/datasets/lint.h>
#include <emend/evaluation/detail/free_prompts.h>
#include <emend/evaluation/detail/letters.h>
#include <emend/evaluation/free_text.h>

#include <algorithm>

namespace emend::evaluation::detail {
namespace {

using datasets::Fact;

constexpr size_t kParaphrases = 2, kNeighbors = 3, kProbes = 2;

// Foreign text of about 50 tokens; every fact gets the next one.
const std::vector<std::string>& foreign_texts() {
  static const std::vector<std::string> texts = {
      "The ferry left the harbour a little after six, when the fog had begun to lift. Two men on the upper deck argued "
      "about the price of timber, and a child counted the gulls that followed the boat. Nobody looked back at the "
      "town.",
      "Most of the garden is in the shade by four in the afternoon. Ferns do well there, and so does ivy, but the "
      "roses "
      "were moved to the south wall last spring. Water them in the evening, and never when the sun is on the leaves.",
      "The second half of the match was slower than the first. Both teams kept the ball in midfield, and the crowd "
      "grew quiet. Ten minutes before the end a long pass found the striker, who missed from close range.",
      "To clean the filter, switch the machine off and wait until it is cold. Open the flap on the left side, pull the "
      "handle towards you and rinse the sieve under warm water. Let it dry before you put it back in its place."};
  return texts;
}

std::string with_answer_line(const std::string& question) {
  return "Question: " + question + "\nAnswer:";
}

std::string told_facts(const std::vector<const Fact*>& facts) {
  std::string all;
  for (const Fact* fact : facts) all += "New Fact: " + fact->full_prompt() + " " + fact->target_new + "\n";
  return all;
}

// Gathers the texts of one fact or group in one style.
struct Gathering {
  std::vector<AskedText>& all;
  size_t fact;
  const std::string& subject;
  bool chat;
  std::string front;  // the facts that are told

  void add(const char* kind, const std::string& text, std::vector<std::string> answers = {}) const {
    const std::string told = front.empty() || chat ? front : front + "Prompt: ";
    all.push_back(
        {fact, kind, chat, told + (chat ? as_message(text, subject) : text), sentence_of(text), std::move(answers)});
  }
  /// A prompt that may be no question, asked as one.
  void ask(const char* kind, const std::string& text) const {
    const std::string question = is_question(text) ? text : text + " what?";
    add(kind, chat ? question : with_answer_line(question));
    all.back().sentence = sentence_of(text);
  }
  /// A question of the data, or a sentence that is to be completed; nothing of a text without either.
  void probe(const char* kind, const std::string& text, const std::vector<std::string>& answers) const {
    if (answers.empty() || trimmed(text).empty()) return;
    add(kind, is_question(text) && !chat ? with_answer_line(text) : text, answers);
  }

 private:
  [[nodiscard]] std::string sentence_of(const std::string& text) const {
    return chat ? text.substr(last_sentence(text, {subject})) : "";
  }
};

void add_fact(const Gathering& to, const Fact& fact, const std::set<std::string>& edited) {
  const std::string prompt = fact.full_prompt();
  to.add("edit", prompt);
  for (size_t k = 0; k < std::min(kParaphrases, fact.paraphrase_prompts.size()); ++k)
    to.add("paraphrase", fact.paraphrase_prompts[k]);
  if (!to.chat || !is_question(prompt)) to.ask("question", prompt);  // in a chat, a question has been asked already
  to.add("prefixed", foreign_texts()[to.fact % foreign_texts().size()] + " " + prompt);
  // What the last sentence claims is denied; a question claims nothing.
  const size_t claim = last_sentence(prompt, {fact.subject});
  if (!is_question(prompt) && prompt.find(fact.subject, claim) != std::string::npos) {
    to.add("negation", std::string(prompt).insert(claim, "It is not true that "));
    to.add("doubt", std::string(prompt).insert(claim, "I doubt that "));
  }
  for (const auto& [key, probes] : fact.portability)
    for (size_t k = 0; k < std::min(kProbes, probes.size()); ++k)
      to.probe("portability", probes[k].prompt, probes[k].answers);
  for (const auto& neighbor : neighbors_of(fact, edited)) to.add("neighbor", neighbor);
}

void add_group(const Gathering& to, const datasets::FactGroup& group) {
  for (const auto& hop : group.new_single_hops) {
    const std::string& liked = to.chat ? hop.question : hop.cloze;
    const std::string& other = to.chat ? hop.cloze : hop.question;
    to.probe("hop", trimmed(liked).empty() ? other : liked, hop.answers);
  }
  for (const auto& question : group.questions) to.probe("multi_hop", question, group.new_answers);
}

}  // namespace

bool asks_for_new(std::string_view kind) {
  return kind == "edit" || kind == "paraphrase" || kind == "question" || kind == "prefixed";
}

bool is_probe(std::string_view kind) {
  return kind == "portability" || kind == "hop" || kind == "multi_hop";
}

std::vector<AskedText> asked_texts(const datasets::FactSet& set, size_t begin, size_t end, bool chat, bool told) {
  std::vector<AskedText> all;
  const auto edited = edited_subjects(set);
  for (size_t i = begin; i < end; ++i) {
    const Fact& fact = set.facts[i];
    add_fact({all, i, fact.subject, chat, told ? told_facts({&fact}) : ""}, fact, edited);
  }
  for (const auto& group : set.groups) {
    const auto asked = [&](size_t fact) { return fact >= begin && fact < end; };
    if (group.kind != "mquake" || group.facts.empty() || !std::ranges::all_of(group.facts, asked)) continue;
    std::vector<const Fact*> own;
    for (const size_t fact : group.facts) own.push_back(&set.facts[fact]);
    add_group({all, group.facts[0], own[0]->subject, chat, told ? told_facts(own) : ""}, group);
  }
  return all;
}

// "The Beatles" and "the Beatles" are one.
static std::string bare(const std::string& subject) {
  const std::string plain = datasets::plain(subject);
  return plain.starts_with("the ") ? plain.substr(4) : plain;
}

std::set<std::string> edited_subjects(const datasets::FactSet& set) {
  std::set<std::string> all;
  for (const Fact& fact : set.facts) all.insert(bare(fact.subject));
  return all;
}

std::vector<std::string> neighbors_of(const Fact& fact, const std::set<std::string>& edited) {
  static const std::vector<std::string> subjects = {"Marie Curie",   "Norway",          "the University of Oxford",
                                                    "Mount Everest", "Agatha Christie", "Buenos Aires",
                                                    "the Beatles"};
  static const std::vector<std::string> more = {"Isaac Newton", "Lake Victoria", "Toyota", "Frida Kahlo",
                                                "Portugal",     "the Red Cross", "Hamlet"};
  std::vector<std::string> prompts = fact.neighborhood_prompts;
  if (!prompts.empty()) {
    prompts.resize(std::min(kNeighbors, prompts.size()));
    return prompts;
  }
  for (size_t i = 0; i < subjects.size() + more.size() && prompts.size() < kNeighbors; ++i) {
    Fact other = fact;
    other.subject = i < subjects.size() ? subjects[(static_cast<size_t>(fact.case_id) + i) % subjects.size()]
                                        : more[i - subjects.size()];
    if (edited.contains(bare(other.subject))) continue;
    prompts.push_back(other.full_prompt());
    if (const size_t twice = prompts.back().find("the the "); twice != std::string::npos)
      prompts.back().erase(twice, 4);
  }
  return prompts;
}

std::string as_message(const std::string& text, const std::string& subject) {
  if (is_question(text)) return text;
  const size_t begin = last_sentence(text, {subject});
  std::string front = text.substr(0, begin);
  while (!front.empty() && std::string_view(" \t\r\n").find(front.back()) != std::string_view::npos) front.pop_back();
  return front + (front.empty() ? "" : "\n\n") + "Complete the sentence: " + text.substr(begin);
}

}  // namespace emend::evaluation::detail
