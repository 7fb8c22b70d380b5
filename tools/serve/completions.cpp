#include "completions.h"

#include <emend/core/mapped.h>
#include <emend/core/text.h>
#include <emend/core/utf8.h>

#include <algorithm>
#include <ctime>
#include <random>

namespace emend::tools::serve {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

std::vector<std::string> stops(const json& request) {
  std::vector<std::string> stop;
  const auto value = request.value("stop", json::array());
  for (const std::string one : value.is_array() ? value : json::array({value}))
    if (!one.empty()) stop.push_back(one);
  return stop;
}

std::string content_text(const json& content) {
  if (content.is_string()) return content;
  std::string text;
  for (const auto& part : content) text += part["text"].get<std::string>();
  return text;
}

std::vector<models::ChatMessage> messages(const json& request) {
  std::vector<models::ChatMessage> list;
  for (const auto& one : request["messages"]) {
    const std::string role = one["role"];
    list.push_back({role == "developer" ? "system" : role, content_text(one["content"])});
  }
  return list;
}

}  // namespace

struct Completions::Asked {
  bool chat = false, streamed = false, usage = false, log_probs = false;
  std::string id, model, echo;
  int64_t prompt_tokens = 0;
  std::time_t created = std::time(nullptr);  // of all chunks
  std::vector<Task> tasks;
  std::vector<std::shared_ptr<Answer>> answers;

  [[nodiscard]] ordered_json head(bool chunk) const {
    const std::string object = chat ? (chunk ? "chat.completion.chunk" : "chat.completion") : "text_completion";
    return {{"id", id}, {"object", object}, {"created", created}, {"model", model}};
  }
  [[nodiscard]] ordered_json usage_figures() const {
    int64_t tokens = 0;
    for (const auto& answer : answers) tokens += answer->tokens();
    return {{"prompt_tokens", prompt_tokens}, {"completion_tokens", tokens}, {"total_tokens", prompt_tokens + tokens}};
  }
};

Completions::Completions(Engine& engine, const PackFolder& packs, std::string base, CompletionLimits limits,
                         const editors::RuntimeScope& beside)
    : engine_(engine),
      packs_(packs),
      base_(std::move(base)),
      limits_(std::move(limits)),
      beside_(beside),
      created_(std::time(nullptr)) {}

ordered_json Completions::model(const std::string& id) const {
  return {{"id", id}, {"object", "model"}, {"created", created_}, {"owned_by", "emend"}};
}

Reply Completions::models() const {
  auto data = ordered_json::array({model(base_)});
  for (const auto& name : packs_.names()) data.push_back(model(base_ + "+" + name));
  return json_reply({{"object", "list"}, {"data", data}});
}

PackSet Completions::packs_of(const std::string& text) const {
  if (text.empty() || text == base_) return packs_.in_force();
  if (!text.starts_with(base_ + "+"))
    throw HttpError(404, "there is no such model; expected " + base_ + " or " + base_ + "+PACK", "model_not_found");
  std::vector<std::string> names;
  for (size_t begin = base_.size() + 1; begin <= text.size();) {
    const size_t end = std::min(text.find('+', begin), text.size());
    if (end > begin) names.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return packs_.named(names);
}

std::string Completions::prefix(const PackSet& packs, const std::string& prompt) const {
  std::string front = beside_.prefix(prompt);
  for (const auto& one : packs)
    for (const auto& part : one.pack->runtime)
      if (part.tensors.empty()) {  // those that have some work inside the model
        const auto edit = editors::make_runtime(part, engine_.model(), one.name);
        if (edit.prefix) front += edit.prefix(prompt);
      }
  return front;
}

// Read with the first chat: a template that cannot be parsed is no fault of other requests.
models::ChatFormat Completions::chat_format() const {
  const std::lock_guard lock(mutex_);
  if (!format_) format_ = models::chat_format_of(engine_.model().tokenizer(), limits_.chat_format);
  return *format_;
}

std::vector<std::vector<int64_t>> Completions::prompts(const json& request, const PackSet& packs, bool chat) const {
  const auto& tokenizer = engine_.model().tokenizer();
  if (chat) {
    auto turns = messages(request);
    turns.back().content = prefix(packs, turns.back().content) + turns.back().content;
    return {models::encode_chat(tokenizer, models::render_chat(chat_format(), turns, true).text).ids};
  }
  const auto& prompt = request["prompt"];
  const bool ids = prompt.is_array() && !prompt.empty() && prompt[0].is_number();
  std::vector<std::vector<int64_t>> rows;
  for (const auto& one : prompt.is_array() && !ids ? prompt : json::array({prompt})) {
    if (rows.size() == 16) refuse("prompt: expected at most 16 of them");
    if (one.is_array()) {
      for (const auto& id : one)
        if (!id.is_number_unsigned() || id.get<uint64_t>() >= static_cast<uint64_t>(engine_.model().vocab_size()))
          refuse("prompt: " + shorten(id.dump()) + "; expected the number of a token of the vocabulary");
      rows.push_back(one.get<std::vector<int64_t>>());
      if (!prefix(packs, tokenizer.decode(rows.back(), /*skip_special=*/true)).empty())
        refuse("packs: one puts text in front of the prompt, which tokens have no place for; give the prompt as text");
    } else if (!one.is_string()) {
      refuse("prompt: " + shorten(one.dump()) + "; expected a text, tokens, or a list of either");
    } else {
      const std::string text = one;
      rows.push_back(tokenizer.encode_prompt(prefix(packs, text) + text).ids);
    }
  }
  return rows;
}

Completions::Asked Completions::read(const json& request, bool chat) const {
  Asked asked;
  asked.chat = chat;
  asked.streamed = request.value("stream", false);
  asked.usage = request.value("stream_options", json::object()).value("include_usage", false);
  asked.model = request.value("model", base_);
  const PackSet packs = packs_of(asked.model);
  AnswerOptions options;
  bool unlimited = true;
  options.max_tokens = std::min<int64_t>(chat ? 512 : 16, limits_.max_tokens);
  for (const char* key : {"max_tokens", "max_completion_tokens"}) {
    if (!request.contains(key)) continue;
    unlimited = false;
    options.max_tokens = request[key];
    if (options.max_tokens > limits_.max_tokens)
      refuse(std::string(key) + ": " + request[key].dump() + "; expected at most " +
             std::to_string(limits_.max_tokens));
  }
  options.begins = chat;
  options.stop = stops(request);
  options.deadline = std::chrono::steady_clock::now() + std::chrono::seconds(limits_.timeout_s);
  if (chat ? request.value("logprobs", false) : request.contains("logprobs"))
    options.top_log_probs = request.value(chat ? "top_logprobs" : "logprobs", 0);
  else if (request.value("top_logprobs", 0) > 0)
    refuse("top_logprobs: only beside \"logprobs\": true");
  asked.log_probs = options.top_log_probs >= 0;
  models::GenerateOptions sampling;
  sampling.temperature = request.value("temperature", 1.0);
  sampling.top_p = request.value("top_p", 1.0);
  if (sampling.top_p == 0) sampling.temperature = 0, sampling.top_p = 1;
  sampling.max_new_tokens = options.max_tokens;
  sampling.seed =
      request.contains("seed") ? static_cast<uint64_t>(request["seed"].get<int64_t>()) : std::random_device{}();
  const bool echo = request.value("echo", false);
  if (echo && (!request["prompt"].is_string() || asked.log_probs))
    refuse("echo: only with one text, and without logprobs");
  if (echo) asked.echo = request["prompt"];
  const int64_t n = request.value("n", 1), room = engine_.most_tokens(), least = 1;
  const int64_t most = options.max_tokens;
  for (auto& ids : prompts(request, packs, chat)) {
    const auto length = std::ssize(ids);
    asked.prompt_tokens += length;
    if (unlimited)
      sampling.max_new_tokens = options.max_tokens = std::clamp(room - length, least, std::max(least, most));
    for (int64_t i = 0; i < n; ++i) {
      auto answer = std::make_shared<Answer>(engine_.model().tokenizer(), options);
      if (asked.log_probs)
        sampling.on_logits = [raw = answer.get()](int64_t, int64_t id, const at::Tensor& logits) {
          raw->note_logits(id, logits);
        };
      asked.tasks.push_back({ids, sampling, packs, std::ssize(asked.tasks), answer});
      asked.answers.push_back(answer);
    }
  }
  return asked;
}

void Completions::start(Asked& asked) {
  {
    const std::lock_guard lock(mutex_);
    asked.id = (asked.chat ? "chatcmpl-" : "cmpl-") + std::to_string(created_) + "-" + std::to_string(++number_);
  }
  if (asked.tasks.front().sampling.max_new_tokens == 0)
    for (const auto& answer : asked.answers) answer->end("length");
  else
    engine_.submit(std::move(asked.tasks));
}

Reply Completions::complete(const Request& request, bool chat) {
  auto asked = std::make_shared<Asked>(read(request.json(), chat));
  start(*asked);
  if (!asked->streamed) return json_reply(whole(*asked));
  return {.stream = [this, asked](const Write& write) { stream(*asked, write); }};
}

// In the plain interface a token that holds no whole characters is written as its bytes.
static std::string plain_token(const std::string& bytes) {
  if (!first_invalid_utf8(bytes)) return bytes;
  std::string text = "bytes:";
  for (const char c : bytes) text += formatted("\\x%02x", static_cast<unsigned char>(c));
  return text;
}

// Of one piece, in the form of the chat or of the plain interface. `offset`: of its first token in the text, then of
// the next piece's, which a text that is held back would not tell.
ordered_json Completions::log_probs(const Asked& asked, const Piece& piece, size_t& offset) const {
  if (!asked.log_probs) return nullptr;
  const auto& tokenizer = engine_.model().tokenizer();
  const auto one = [&](int64_t id, double log_prob) -> ordered_json {
    const std::string bytes = tokenizer.token_bytes(id);
    return {{"token", bytes},
            {"logprob", log_prob},
            {"bytes", std::vector<int>(reinterpret_cast<const unsigned char*>(bytes.data()),
                                       reinterpret_cast<const unsigned char*>(bytes.data()) + bytes.size())}};
  };
  auto content = ordered_json::array(), tokens = ordered_json::array(), values = ordered_json::array(),
       tops = ordered_json::array(), offsets = ordered_json::array();
  for (const auto& token : piece.tokens) {
    auto entry = one(token.id, token.log_prob);
    auto top = ordered_json::object();
    entry["top_logprobs"] = ordered_json::array();
    for (const auto& [id, log_prob] : token.top) {
      entry["top_logprobs"].push_back(one(id, log_prob));
      top[plain_token(tokenizer.token_bytes(id))] = log_prob;
    }
    const std::string bytes = tokenizer.token_bytes(token.id);
    tokens.push_back(plain_token(bytes));
    values.push_back(token.log_prob);
    tops.push_back(top);
    offsets.push_back(offset);
    if (!tokenizer.is_special(token.id)) offset += width_of(bytes);  // which the text leaves out
    content.push_back(std::move(entry));
  }
  if (asked.chat) return {{"content", content}, {"refusal", nullptr}};
  return {{"tokens", tokens}, {"token_logprobs", values}, {"top_logprobs", tops}, {"text_offset", offsets}};
}

// If one fails the others are let go.
static std::vector<Piece> whole_pieces(const std::vector<std::shared_ptr<Answer>>& answers) {
  try {
    return mapped(answers, [](const auto& answer) { return answer->whole(); });
  } catch (...) {
    for (const auto& answer : answers) answer->abandon();
    throw;
  }
}

ordered_json Completions::whole(const Asked& asked) {
  auto document = asked.head(false);
  auto choices = ordered_json::array();
  const auto pieces = whole_pieces(asked.answers);
  for (size_t i = 0; i < asked.answers.size(); ++i) {
    const Piece& piece = pieces[i];
    ordered_json choice = {{"index", i}};
    if (asked.chat)
      choice["message"] = {{"role", "assistant"}, {"content", piece.text}, {"refusal", nullptr}};
    else
      choice["text"] = asked.echo + piece.text;
    size_t offset = width_of(asked.echo);
    choice["logprobs"] = log_probs(asked, piece, offset);
    choice["finish_reason"] = asked.answers[i]->finish_reason();
    choices.push_back(std::move(choice));
  }
  document["choices"] = choices;
  document["usage"] = asked.usage_figures();
  note(asked);
  return document;
}

// Choice after choice in the order in which they have something to say would need a queue for all: they take turns.
void Completions::stream(const Asked& asked, const Write& write) {
  size_t offset = 0;
  const auto send = [&](size_t index, const Piece* piece, bool first, const std::string& reason) {
    auto chunk = asked.head(true);
    ordered_json choice = {{"index", index}};
    if (asked.chat) {
      choice["delta"] = ordered_json::object();
      if (first) choice["delta"]["role"] = "assistant";
      if (piece) choice["delta"]["content"] = piece->text;
    } else {
      choice["text"] = piece ? piece->text : (first ? asked.echo : "");
    }
    choice["logprobs"] = piece ? log_probs(asked, *piece, offset) : ordered_json();
    choice["finish_reason"] = reason.empty() ? ordered_json() : ordered_json(reason);
    chunk["choices"] = {choice};
    if (asked.usage) chunk["usage"] = nullptr;
    return write(event_line(chunk));
  };
  bool there = true;
  try {
    for (size_t i = 0; there && i < asked.answers.size(); ++i) {
      offset = width_of(asked.echo);
      there = send(i, nullptr, true, "");
      for (Piece piece; there && asked.answers[i]->next(piece);) there = send(i, &piece, false, "");
      if (there) there = send(i, nullptr, false, asked.answers[i]->finish_reason());
    }
    if (there && asked.usage) {
      auto last = asked.head(true);
      last["choices"] = ordered_json::array();
      last["usage"] = asked.usage_figures();
      there = write(event_line(last));
    }
  } catch (const HttpError& error) {
    write(event_line(error.body()));
  } catch (const std::exception& error) {
    write(event_line(HttpError(500, error.what()).body()));
  }
  for (const auto& answer : asked.answers) answer->abandon();
  if (there) write("data: [DONE]\n\n");
  note(asked);
}

void Completions::note(const Asked& asked) {
  const std::lock_guard lock(mutex_);
  for (const auto& answer : asked.answers) {
    if (answer->tokens() == 0) continue;
    first_seconds_ += answer->seconds_to_first();
    ++first_count_;
  }
}

std::pair<double, int64_t> Completions::first_tokens() const {
  const std::lock_guard lock(mutex_);
  return {first_seconds_, first_count_};
}

}  // namespace emend::tools::serve
