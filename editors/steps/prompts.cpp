#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/editors/steps/prompts.h>
#include <emend/models/tokenizer/tokenizer.h>

#include <array>

namespace emend::editors {
namespace {

constexpr std::array<std::pair<std::string_view, FactToken>, 4> kFactTokens = {{
    {"subject_last", FactToken::kSubjectLast},
    {"subject_first", FactToken::kSubjectFirst},
    {"subject_first_after_last", FactToken::kSubjectFirstAfterLast},
    {"last", FactToken::kLast},
}};

// Start of the UTF-8 character that ends at `end`.
size_t last_character(std::string_view text, size_t begin, size_t end) {
  size_t at = end - 1;
  while (at > begin && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

}  // namespace

FactToken parse_fact_token(std::string_view text) {
  for (const auto& [name, value] : kFactTokens)
    if (name == text) return value;
  refuse({"fact_token", "\"" + std::string(text) + "\"",
          "subject_last, subject_first, subject_first_after_last or last",
          did_you_mean(text, kFactTokens, "", key_of)});
}

std::string with_leading_space(std::string_view target) {
  return target.starts_with(' ') ? std::string(target) : " " + std::string(target);
}

std::vector<int64_t> target_token_ids(const models::Tokenizer& tokenizer, std::string_view prompt,
                                      std::string_view target) {
  const auto alone = tokenizer.encode_ids(prompt, false);
  const auto together = tokenizer.encode_ids(std::string(prompt) + std::string(target), false);
  if (together.size() > alone.size() && std::equal(alone.begin(), alone.end(), together.begin()))
    return {together.begin() + std::ssize(alone), together.end()};
  auto ids = tokenizer.encode_ids(target, false);
  if (ids.size() > 1 && (ids[0] == tokenizer.bos_id() || ids[0] == tokenizer.unk_id())) ids.erase(ids.begin());
  return ids;
}

int64_t looked_up_token(const models::Encoding& encoding, std::string_view text, std::pair<size_t, size_t> subject,
                        FactToken fact_token) {
  const auto [begin, end] = subject;
  const auto tokens = encoding.overlapping(begin, end);
  const auto final = static_cast<int64_t>(encoding.size()) - 1;
  if (tokens.first < 0) return -1;
  switch (fact_token) {
    case FactToken::kSubjectLast: {
      const auto last = encoding.overlapping(last_character(text, begin, end), end);
      return (last.first < 0 ? tokens.second : last.second) - 1;
    }
    case FactToken::kSubjectFirst:
      return tokens.first;
    case FactToken::kSubjectFirstAfterLast:
      return std::min(tokens.second, final);
    case FactToken::kLast:
      return final;
  }
  return -1;
}

PromptRow render_prompt(const models::Tokenizer& tokenizer, std::string_view template_text, std::string_view subject,
                        FactToken fact_token) {
  const size_t slot = template_text.find("{}");
  EMEND_CHECK(slot != std::string_view::npos, "a template without {}");
  PromptRow row;
  row.text =
      std::string(template_text.substr(0, slot)) + std::string(subject) + std::string(template_text.substr(slot + 2));
  const size_t begin = slot, end = slot + subject.size();
  auto encoding = tokenizer.encode_prompt(row.text);
  row.subject = encoding.overlapping(begin, end);
  if (row.subject.first < 0) {
    refuse({"prompt \"" + row.text + "\"", "the subject \"" + std::string(subject) + "\" has no token of its own",
            "a subject that the tokenizer keeps", "write the subject in other characters"});
  }
  row.lookup = looked_up_token(encoding, row.text, {begin, end}, fact_token);
  row.ids = std::move(encoding.ids);
  return row;
}

RenderedFact render_prompts(const models::Tokenizer& tokenizer, const datasets::Fact& fact,
                            const ContextTemplates& contexts, const RenderOptions& options) {
  RenderedFact rendered;
  rendered.case_id = fact.case_id;
  rendered.where = fact.where();
  rendered.subject = fact.subject;
  rendered.target = with_leading_space(fact.target_new);
  try {
    datasets::validate(fact, rendered.where);
    rendered.target_ids = target_token_ids(tokenizer, fact.full_prompt(), rendered.target);
    for (const auto& context : contexts.flat()) {
      std::string text = context;
      text.replace(text.find("{}"), 2, fact.prompt);
      rendered.rows.push_back(render_prompt(tokenizer, text, fact.subject, options.fact_token));
    }
    for (const auto& prompt : options.kl_prompts)
      rendered.kl_rows.push_back(render_prompt(tokenizer, prompt, fact.subject, options.fact_token));
  } catch (const Error& error) {
    auto parts = parts_of(error);
    if (!parts.where.starts_with(rendered.where))
      parts.where = rendered.where + (parts.where.empty() ? "" : ": " + parts.where);
    throw Error(error.error_class(), parts);
  }
  if (rendered.target_ids.empty()) {
    refuse({rendered.where, "the target \"" + fact.target_new + "\" has no tokens", "a target of at least one token",
            "write the target in other characters"});
  }
  return rendered;
}

std::vector<int64_t> with_target(const PromptRow& row, const std::vector<int64_t>& target_ids) {
  std::vector<int64_t> ids = row.ids;
  ids.insert(ids.end(), target_ids.begin(), target_ids.end() - 1);
  return ids;
}

}  // namespace emend::editors
