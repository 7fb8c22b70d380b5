#include "api.h"

#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/mapped.h>
#include <emend/core/text.h>
#include <emend/datasets/lint.h>
#include <emend/editors/registry.h>
#include <emend/evaluation/scoring.h>
#include <emend/evaluation/tracing.h>
#include <emend/models/config.h>
#include <emend/workflow/save_formats.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <fstream>

namespace emend::tools::serve {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
namespace fs = std::filesystem;

PackSet packs_asked(const Api& api, const json& request) {
  if (request.contains("packs")) return api.packs.named(request["packs"].get<std::vector<std::string>>());
  return api.completions.packs_of(request.value("model", ""));
}

std::vector<std::string> names_of(const PackSet& packs) {
  return mapped(packs, [](const auto& one) { return one.name; });
}

// A prompt to be asked, with what a pack puts in front of it.
struct Probe {
  std::vector<int64_t> ids;
  std::vector<evaluation::ScoreRequest> targets;
};

std::vector<Probe> read_probes(const Api& api, const json& prompts, int64_t tokens, const PackSet& packs) {
  const auto& tokenizer = api.engine.model().tokenizer();
  const int64_t most = api.engine.most_tokens();
  std::vector<Probe> probes;
  for (const auto& one : prompts) {
    const std::string prompt = one.at("prompt"), text = api.completions.prefix(packs, prompt) + prompt;
    auto& probe = probes.emplace_back();
    probe.ids = tokenizer.encode_prompt(text).ids;
    const auto length = std::ssize(probe.ids) + tokens;
    if (probe.ids.empty() || length > most)
      refuse("prompts: " + std::to_string(length) + " tokens with the new ones; expected a text, and at most " +
             std::to_string(most));
    for (const auto& target : one.value("targets", json::array())) {
      probe.targets.push_back({text, target.get<std::string>()});
      if (trimmed(probe.targets.back().target).empty()) refuse("targets: an empty text; expected an answer");
      const auto whole = std::ssize(tokenizer.encode_ids(text + " " + probe.targets.back().target, true));
      if (whole > most)
        refuse("targets: " + std::to_string(whole) + " tokens with the prompt; expected at most " +
               std::to_string(most));
    }
  }
  return probes;
}

// What the model says and how probable it finds the targets, a list in the order of the probes.
ordered_json ask(std::span<const Probe> probes, int64_t tokens, const models::Model& model, const CancelToken& cancel) {
  std::vector<std::vector<int64_t>> rows;
  std::vector<evaluation::ScoreRequest> requests;
  for (const auto& probe : probes) {
    rows.push_back(probe.ids);
    requests.insert(requests.end(), probe.targets.begin(), probe.targets.end());
  }
  models::GenerateOptions generate;
  generate.max_new_tokens = tokens;
  generate.stop_ids = model.tokenizer().eos_ids();
  generate.cancel = cancel;
  const auto texts = models::generate(model, rows, generate);
  const auto scores = evaluation::score_requests(model, requests, {.cancel = cancel});
  auto list = ordered_json::array();
  size_t next = 0;
  for (size_t i = 0; i < probes.size(); ++i) {
    auto targets = ordered_json::array();
    for (const auto& target : probes[i].targets) {
      const auto& score = scores[next++];
      targets.push_back({{"target", target.target},
                         {"probability", std::exp(score.total_log_prob())},
                         {"log_probability", score.total_log_prob()}});
    }
    list.push_back({{"text", model.tokenizer().decode_more(texts[i], true)}, {"targets", targets}});
  }
  return list;
}

// All prompts with these packs, as many at once as the cache holds: between them other answers go on.
ordered_json ask(Api& api, const json& prompts, int64_t tokens, const PackSet& packs) {
  const auto probes = read_probes(api, prompts, tokens, packs);
  auto all = ordered_json::array();
  for (size_t begin = 0, end = 0; begin < probes.size(); begin = end) {
    for (int64_t longest = 1; end < probes.size(); ++end) {
      longest = std::max(longest, std::ssize(probes[end].ids) + tokens);
      if (static_cast<int64_t>(end - begin) >= api.engine.rows_of(longest)) break;
    }
    const auto some = std::span(probes).subspan(begin, end - begin);
    api.engine.with(packs, [&](const auto& model, const auto&) {
      for (auto& one : ask(some, tokens, model, api.engine.stopping())) all.push_back(std::move(one));
    });
  }
  return all;
}

Reply probe(Api& api, const Request& asked) {
  const auto request = asked.json();
  const auto& prompts = request["prompts"];
  const auto tokens = request.value("max_tokens", int64_t{20});
  const PackSet packs = packs_asked(api, request);
  const auto before = ask(api, prompts, tokens, {});
  const auto after = packs.empty() ? before : ask(api, prompts, tokens, packs);
  auto results = ordered_json::array();
  for (size_t i = 0; i < prompts.size(); ++i)
    results.push_back({{"prompt", prompts[i]["prompt"]}, {"before", before[i]}, {"after", after[i]}});
  return json_reply({{"packs", names_of(packs)}, {"results", results}});
}

Reply trace(Api& api, const Request& asked) {
  const auto request = asked.json();
  datasets::Fact fact;
  fact.subject = request["subject"];
  fact.prompt = datasets::with_slot(request["prompt"], fact.subject);
  const std::string prompt = fact.full_prompt();
  if (trimmed(fact.subject).empty()) refuse("subject: blank; expected words of the prompt");
  evaluation::TraceOptions options;
  options.any_answer = true;
  options.samples = request.value("samples", 4);
  if (api.engine.model().tokenizer().encode_ids(prompt).size() > 128) refuse("prompt: expected at most 128 tokens");
  const PackSet packs = packs_asked(api, request);
  if (!api.completions.prefix(packs, prompt).empty())
    refuse(api.completions.prefix({}, prompt).empty()
               ? "packs: one puts text in front of the prompt, which a trace has no place for; name the others, or [] "
                 "for none"
               : "prompt: an edit of the model's own folder puts text in front of it, which a trace has no place for");
  ordered_json document;
  api.jobs.with(packs, [&](models::Model& model, const CancelToken& cancel) {
    options.cancel = cancel;
    document = evaluation::to_json(evaluation::trace_facts(model, {fact}, options));
  });
  document["packs"] = names_of(packs);
  return json_reply(document);
}

Reply lint(const Request& asked) {
  const auto request = asked.json();
  const datasets::ReadOptions read{
      .format = request.value("format", "auto"), .bad_rows = datasets::BadRowPolicy::kSkip, .allow_empty = true};
  const auto facts = datasets::parse_fact_rows(request["facts"], "facts", read);
  auto findings = ordered_json::array(), rows = ordered_json::array();
  for (const auto& finding : datasets::lint_facts(facts))
    findings.push_back({{"severity", datasets::to_string(finding.severity)},
                        {"check", finding.check},
                        {"where", finding.where},
                        {"line", datasets::line_of(finding)},
                        {"text", finding.text}});
  for (const auto& fact : facts.facts) rows.push_back(ordered_json(datasets::to_json(fact)));
  return json_reply({{"format", facts.format}, {"count", facts.facts.size()}, {"facts", rows}, {"findings", findings}});
}

Reply patch_pack(Api& api, const Request& asked) {
  const auto request = asked.json();
  PackFolder::Change change;
  if (request.contains("active")) change.active = request["active"].get<bool>();
  if (request.contains("position")) change.position = request["position"].get<size_t>();
  if (request.contains("strength")) change.strength = request["strength"].get<double>();
  if (change.position && !change.active.value_or(false)) refuse("position: only beside \"active\": true");
  if (request.empty()) refuse("active, strength: missing; expected at least one of them");
  api.packs.change(asked.id, change);
  return json_reply(api.packs.describe(asked.id));
}

// Folders go as one uncompressed tar archive.
std::string tar(const fs::path& folder) {
  std::string archive;
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file()) files.push_back(entry.path());
  std::ranges::sort(files);
  for (const auto& file : files) {
    const std::string bytes = read_file(file), name = (folder.filename() / fs::relative(file, folder)).string();
    std::string head(512, '\0');
    const auto put = [&](size_t at, const std::string& text) { head.replace(at, text.size(), text); };
    const std::string size = formatted("%011zo", bytes.size());
    const std::pair<size_t, std::string> fields[] = {
        {0, name.substr(0, 99)}, {100, "0000644"},  {108, "0000000"}, {116, "0000000"}, {124, size},
        {136, "00000000000"},    {148, "        "}, {156, "0"},       {257, "ustar"},   {263, "00"}};
    for (const auto& [at, text] : fields) put(at, text);
    unsigned sum = 0;
    for (const unsigned char c : head) sum += c;
    put(148, formatted("%06o", sum) + '\0' + " ");
    archive += head + bytes + std::string((512 - bytes.size() % 512) % 512, '\0');
  }
  return archive + std::string(1024, '\0');
}

std::shared_ptr<std::istream> opened(const fs::path& path) {
  auto file = std::make_shared<std::ifstream>(path, std::ios::binary);
  if (!*file) emend::refuse({path.string(), "cannot be read", "a readable file", ""});
  return file;
}

Reply download(Api& api, const Request& asked) {
  const auto found = asked.query.find("as");
  const std::string as = found == asked.query.end() ? "pack" : found->second;
  const PackSet packs = api.packs.named({asked.id});
  if (as != "pack" && as != "peft" && as != "lora" && as != "gguf") refuse("as: expected pack, peft, lora or gguf");
  const std::string end = as == "pack" ? ".safetensors" : as == "peft" ? ".tar" : as == "lora" ? ".lora.gguf" : ".gguf";
  Reply reply{.type = "application/octet-stream",
              .headers = {{"Content-Disposition", "attachment; filename=\"" + asked.id + end + "\""}}};
  if (as == "pack" && packs[0].strength == 1) {
    reply.file = opened(api.packs.file(asked.id));
    return reply;
  }
  static std::atomic<int> number{0};
  const fs::path folder = api.scratch / ("download-" + std::to_string(++number)),
                 out = folder / (asked.id + (as == "peft" ? "" : end));
  fs::create_directories(folder);
  const workflow::Handles lent{.log = api.log};
  std::exception_ptr failed;
  try {
    if (as == "pack") {
      auto pack = *packs[0].pack;
      const auto own = editors::load_pack(api.packs.file(asked.id));  // for the model that it was made on
      pack.base_fingerprint = own.base_fingerprint;
      pack.under = own.under;
      editors::save_pack(out, pack);
    } else {
      const auto& format = workflow::save_format(as);
      api.engine.with({}, [&](models::Model& model, const auto&) {
        if (format.check) format.check(model, "as");
        (void)format.write({.model = model, .pack = *packs[0].pack, .out = out, .lent = lent});
      });
    }
    if (as == "peft")
      reply.body = tar(out);
    else
      reply.file = opened(out);  // and has no name below
  } catch (...) {
    failed = std::current_exception();
  }
  fs::remove_all(folder);
  if (failed) std::rethrow_exception(failed);
  return reply;
}

ordered_json health(const Api& api) {
  auto editors = ordered_json::array();
  for (const auto& editor : editors::all_editors()) editors.push_back(editor.name);
  return {{"status", "ok"},
          {"model", api.completions.base()},
          {"family", api.engine.model().config().model_type},
          {"packs", names_of(api.packs.in_force())},
          {"editors", editors}};
}

std::string metrics(const Api& api) {
  const auto figures = api.engine.figures();
  const auto [seconds, count] = api.completions.first_tokens();
  const auto line = [](const std::string& name, const char* type, auto value) {
    return "# TYPE emend_" + name + " " + type + "\nemend_" + name + " " + json(value).dump() + "\n";
  };
  return line("generated_tokens_total", "counter", figures.tokens) +
         line("requests_waiting", "gauge", figures.waiting) + line("rows_running", "gauge", figures.running) +
         line("kv_cache_bytes", "gauge", figures.cache_bytes) + line("pack_sets_kept", "gauge", figures.sets) +
         line("packs_in_force", "gauge", api.packs.in_force().size()) +
         line("first_token_seconds_sum", "counter", seconds) + line("first_token_seconds_count", "counter", count) +
         (api.http_metrics ? api.http_metrics() : "");
}

// A report has one script of its own, which must not reach the server.
constexpr const char* kReportPolicy =
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; sandbox allow-scripts";

// Bodies. What would change an answer and is not offered may say so as long as it does not: {"top_k":0}.
constexpr const char* kCompletion =
    R"("model":{"type":"string"},"max_tokens":{"type":"integer","minimum":0},"temperature":{"type":"number","minimum":0,"maximum":100},
"top_p":{"type":"number","minimum":0,"maximum":1},"seed":{"type":"integer"},"stop":{"type":["string","array"],"items":{"type":"string"},"maxItems":16},
"n":{"type":"integer","minimum":1,"maximum":8},"stream":{"type":"boolean"},
"stream_options":{"type":"object","properties":{"include_usage":{"type":"boolean"},"include_obfuscation":{"type":"boolean"}}},
"max_completion_tokens":{"type":"integer","minimum":0},"tools":{"enum":[[]]},"functions":{"enum":[[]]},"tool_choice":{"enum":["none","auto"]},
"function_call":{"enum":["none","auto"]},"parallel_tool_calls":{"type":"boolean"},"logit_bias":{"enum":[{}]},"suffix":{"enum":[""]},
"modalities":{"enum":[["text"]]},"response_format":{"enum":[{"type":"text"}]},"best_of":{"enum":[1]},"frequency_penalty":{"enum":[0]},
"presence_penalty":{"enum":[0]},"repetition_penalty":{"enum":[1]},"top_k":{"enum":[0,-1]},"min_p":{"enum":[0]},"min_tokens":{"enum":[0]},
"stop_token_ids":{"enum":[[]]},"ignore_eos":{"enum":[false]},"user":{},"store":{},"metadata":{},"service_tier":{},"safety_identifier":{},
"prompt_cache_key":{},"prompt_cache_retention":{})";
constexpr const char* kChat =
    R"(,"messages":{"type":"array","minItems":1,"items":{"type":"object","required":["role","content"],"properties":{"role":{"enum":["system","developer","user","assistant"]},"name":{},
"content":{"type":["string","array"],"items":{"type":"object","required":["type","text"],"properties":{"type":{"enum":["text"]},"text":{"type":"string"}}}}}}},
"logprobs":{"type":"boolean"},"top_logprobs":{"type":"integer","minimum":0,"maximum":20}})";
constexpr const char* kPlain =
    R"(,"prompt":{"type":["string","array"],"minItems":1},"echo":{"type":"boolean"},"logprobs":{"type":"integer","minimum":0,"maximum":20}})";
constexpr const char* kEdit =
    R"("required":["facts"],"properties":{"facts":{"type":["array","string"],"description":"list of facts in any format that memit_edit reads, or a file as text"},
"editor":{"type":"string"},"name":{"type":"string"},"settings":{"type":"object"},"hparams":{"type":"string"},"seed":{"type":"integer","minimum":0},
"eval":{"type":"array","items":{"type":"string"}},"format":{"type":"string"},"active":{"type":"boolean"}})";
constexpr const char* kPack =
    R"("properties":{"active":{"type":"boolean"},"position":{"type":"integer","minimum":0},"strength":{"type":"number","minimum":-10,"maximum":10}})";
constexpr const char* kProbe =
    R"("required":["prompts"],"properties":{"prompts":{"type":"array","minItems":1,"maxItems":64,"items":{"type":"object","required":["prompt"],
"properties":{"prompt":{"type":"string"},"targets":{"type":"array","maxItems":16,"items":{"type":"string"}}}}},
"packs":{"type":"array","items":{"type":"string"}},"model":{"type":"string"},"max_tokens":{"type":"integer","minimum":0,"maximum":200}})";
constexpr const char* kTrace =
    R"("required":["prompt","subject"],"properties":{"prompt":{"type":"string"},"subject":{"type":"string"},"packs":{"type":"array","items":{"type":"string"}},
"model":{"type":"string"},"samples":{"type":"integer","minimum":1,"maximum":10}})";
constexpr const char* kLint =
    R"("required":["facts"],"properties":{"facts":{"type":["array","string","object"]},"format":{"type":"string"}})";

Reply text_reply(std::string_view text, const char* type) {
  return {.body = std::string(text), .type = type};
}

}  // namespace

std::vector<Route> api_routes(Api& api) {
  const std::string completion = R"("properties":{)" + std::string(kCompletion);
  std::vector<Route> routes = {
      {"POST", "/v1/chat/completions", "the next turn of a conversation",
       R"("required":["messages"],)" + completion + kChat, false,
       [&](const Request& r) { return api.completions.complete(r, true); }},
      {"POST", "/v1/completions", "how a text goes on", R"("required":["prompt"],)" + completion + kPlain, false,
       [&](const Request& r) { return api.completions.complete(r, false); }},
      {"GET", "/v1/models", "the model, and the model with each pack", "", false,
       [&](const Request&) { return api.completions.models(); }},
      {"GET", "/v1/models/{id}", "one of them, or the model with any packs: BASE+anna+ben", "", false,
       [&](const Request& r) {
         (void)api.completions.packs_of(r.id);
         return json_reply(api.completions.model(r.id));
       }},
      {"POST", "/v1/edits", "write facts: a job that ends with a pack", kEdit, false,
       [&](const Request& r) { return json_reply(api.jobs.add(r.json()), 202); }},
      {"GET", "/v1/edits", "all jobs", "", false, [&](const Request&) { return json_reply(api.jobs.list()); }},
      {"GET", "/v1/edits/{id}", "one job", "", false,
       [&](const Request& r) { return json_reply(api.jobs.describe(r.id)); }},
      {"DELETE", "/v1/edits/{id}", "cancel a job between two steps", "", false,
       [&](const Request& r) { return json_reply(api.jobs.cancel(r.id)); }},
      {"GET", "/v1/edits/{id}/events", "what a job does, as server-sent events", "", false,
       [&](const Request& r) { return Reply{.stream = api.jobs.events(r.id)}; }},
      {"GET", "/v1/edits/{id}/report", "the report of a job that is done", "", false,
       [&](const Request& r) {
         return Reply{.body = api.jobs.report(r.id),
                      .type = "text/html; charset=utf-8",
                      .headers = {{"Content-Security-Policy", kReportPolicy}}};
       }},
      {"GET", "/v1/packs", "all packs, and those in force in their order", "", false,
       [&](const Request&) { return json_reply(api.packs.list()); }},
      {"PATCH", "/v1/packs/{name}", "put a pack in force or out of it, move it, or set how strongly a direction acts",
       kPack, false, [&](const Request& r) { return patch_pack(api, r); }},
      {"DELETE", "/v1/packs/{name}", "remove a pack for good", "", false,
       [&](const Request& r) {
         api.packs.remove(r.id);
         return json_reply({{"name", r.id}, {"deleted", true}});
       }},
      {"GET", "/v1/packs/{name}/file", "download: ?as=pack, peft (tar), lora or gguf", "", false,
       [&](const Request& r) { return download(api, r); }},
      {"POST", "/v1/probe", "probabilities and continuations without and with packs", kProbe, false,
       [&](const Request& r) { return probe(api, r); }},
      {"POST", "/v1/trace", "causal trace of one prompt", kTrace, false,
       [&](const Request& r) { return trace(api, r); }},
      {"POST", "/v1/lint", "mistakes in a file of facts, by line", kLint, false, lint},
      {"GET", "/healthz", "whether the server is there; with the token also the model and the packs", "", true,
       [&](const Request& r) {
         return json_reply(r.trusted ? health(api) : ordered_json{{"status", "ok"}});
       }},
      {"GET", "/metrics", "figures for Prometheus", "", false,
       [&](const Request&) { return text_reply(metrics(api), "text/plain; version=0.0.4"); }},
      {"GET", "/", "the page", "", true,
       [](const Request&) { return text_reply(page_html(), "text/html; charset=utf-8"); }},
      {"GET", "/page.css", "its style", "", true,
       [](const Request&) { return text_reply(page_css(), "text/css; charset=utf-8"); }},
      {"GET", "/page.js", "its script", "", true,
       [](const Request&) { return text_reply(page_js(), "text/javascript; charset=utf-8"); }}};
  routes.push_back({"GET", "/openapi.json", "this description", "", true, {}});
  routes.back().handle = [document = openapi(routes)](const Request&) { return json_reply(document); };
  return routes;
}

ordered_json openapi(const std::vector<Route>& routes) {
  ordered_json paths = ordered_json::object();
  for (const auto& route : routes) {
    ordered_json operation = {
        {"summary", route.summary},
        {"responses",
         {{"200", {{"description", "OK"}}}, {"default", {{"description", "an error object as OpenAI's"}}}}}};
    if (!route.request.empty())
      operation["requestBody"] = {
          {"content", {{"application/json", {{"schema", ordered_json(object_schema(route.request))}}}}}};
    if (const size_t begin = route.path.find('{'); begin != std::string::npos)
      operation["parameters"] = {{{"name", route.path.substr(begin + 1, route.path.find('}') - begin - 1)},
                                  {"in", "path"},
                                  {"required", true},
                                  {"schema", {{"type", "string"}}}}};
    if (!route.open) operation["security"] = {{{"token", ordered_json::array()}}};
    paths[route.path][lower(route.method)] = std::move(operation);
  }
  return {{"openapi", "3.1.0"},
          {"info", {{"title", "emend serve"}, {"version", "1"}}},
          {"paths", paths},
          {"components", {{"securitySchemes", {{"token", {{"type", "http"}, {"scheme", "bearer"}}}}}}}};
}

}  // namespace emend::tools::serve
