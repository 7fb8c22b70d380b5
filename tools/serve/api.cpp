#include "api.h"

#include <emend/core/atomic_file.h>
#include <emend/core/cache_folder.h>
#include <emend/core/error.h>
#include <emend/datasets/lint.h>
#include <emend/editors/registry.h>
#include <emend/evaluation/scoring.h>
#include <emend/evaluation/tracing.h>
#include <emend/models/config.h>
#include <emend/workflow/save_formats.h>

#include <algorithm>
#include <atomic>
#include <cmath>

namespace emend::tools::serve {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
namespace fs = std::filesystem;

PackSet packs_asked(const Api& api, const json& request) {
  if (request.contains("packs") && !request["packs"].is_null())
    return api.packs.named(request["packs"].get<std::vector<std::string>>());
  return api.completions.packs_of(request.value("model", json()));
}

std::vector<std::string> names_of(const PackSet& packs) {
  std::vector<std::string> names;
  for (const auto& one : packs) names.push_back(one.name);
  return names;
}

// What the model says and how probable it finds the targets, a list in the order of the prompts.
ordered_json ask(const json& prompts, int64_t tokens, const models::Model& model, const editors::RuntimeScope& beside) {
  std::vector<std::vector<int64_t>> rows;
  std::vector<evaluation::ScoreRequest> requests;
  for (const auto& one : prompts) {
    const std::string prompt = one.at("prompt"), text = beside.prefix(prompt) + prompt;
    rows.push_back(model.tokenizer().encode_ids(text, true));
    if (rows.back().empty()) refuse("prompts: an empty text");
    for (const auto& target : one.value("targets", json::array()))
      requests.push_back({text, target.get<std::string>()});
  }
  models::GenerateOptions generate{.max_new_tokens = tokens, .stop_ids = model.tokenizer().eos_ids()};
  const auto texts = models::generate(model, rows, generate);
  const auto scores = evaluation::score_requests(model, requests);
  auto list = ordered_json::array();
  size_t next = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    auto targets = ordered_json::array();
    for (const auto& target : prompts[i].value("targets", json::array())) {
      const auto& score = scores[next++];
      targets.push_back({{"target", target},
                         {"probability", std::exp(score.total_log_prob())},
                         {"log_probability", score.total_log_prob()}});
    }
    list.push_back({{"text", model.tokenizer().decode(texts[i], true)}, {"targets", targets}});
  }
  return list;
}

Reply probe(Api& api, const Request& asked) {
  const auto request = asked.json();
  const auto prompts = request.value("prompts", json::array());
  if (!prompts.is_array() || prompts.empty() || prompts.size() > 64) refuse("prompts: expected a list of 1 to 64");
  for (const auto& one : prompts)
    if (one.value("targets", json::array()).size() > 16) refuse("targets: expected at most 16");
  const auto tokens = request.value("max_tokens", int64_t{20});
  if (tokens < 0 || tokens > 200) refuse("max_tokens: expected 0 to 200");
  const PackSet packs = packs_asked(api, request);
  ordered_json before, after;
  api.engine.with({}, [&](auto& model, const auto& beside) { before = ask(prompts, tokens, model, beside); });
  if (packs.empty())
    after = before;
  else
    api.engine.with(packs, [&](auto& model, const auto& beside) { after = ask(prompts, tokens, model, beside); });
  auto results = ordered_json::array();
  for (size_t i = 0; i < prompts.size(); ++i)
    results.push_back({{"prompt", prompts[i]["prompt"]}, {"before", before[i]}, {"after", after[i]}});
  return json_reply({{"packs", names_of(packs)}, {"results", results}});
}

Reply trace(Api& api, const Request& asked) {
  const auto request = asked.json();
  evaluation::KnownFact fact;
  fact.subject = request.at("subject");
  fact.prompt = request.at("prompt");
  if (const size_t slot = fact.prompt.find("{}"); slot != std::string::npos) fact.prompt.replace(slot, 2, fact.subject);
  evaluation::TraceOptions options;
  options.any_answer = true;
  options.samples = request.value("samples", 4);
  if (options.samples < 1 || options.samples > 10) refuse("samples: expected 1 to 10");
  if (api.engine.model().tokenizer().encode_ids(fact.prompt).size() > 128)
    refuse("prompt: expected at most 128 tokens");
  const PackSet packs = packs_asked(api, request);
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
  const auto& given = request.at("facts");
  datasets::ReadOptions read;
  read.format = request.value("format", "auto");
  read.bad_rows = datasets::BadRowPolicy::kSkip;
  read.allow_empty = true;
  const auto facts = datasets::parse_facts(given.is_string() ? given.get<std::string>() : given.dump(), "facts", read);
  auto findings = ordered_json::array(), rows = ordered_json::array();
  for (const auto& finding : datasets::lint_facts(facts)) {
    const size_t colon = finding.where.rfind(':');
    findings.push_back(
        {{"severity", datasets::to_string(finding.severity)},
         {"check", finding.check},
         {"line", colon == std::string::npos ? 0 : std::strtoll(finding.where.c_str() + colon + 1, nullptr, 10)},
         {"text", finding.text}});
  }
  for (const auto& fact : facts.facts) rows.push_back(ordered_json(datasets::to_json(fact)));
  return json_reply({{"format", facts.format}, {"count", facts.facts.size()}, {"facts", rows}, {"findings", findings}});
}

Reply patch_pack(Api& api, const Request& asked) {
  const auto request = asked.json();
  if (request.contains("strength")) api.packs.set_strength(asked.id, request["strength"].get<double>());
  if (request.contains("strength") && !request.contains("active")) return json_reply(api.packs.describe(asked.id));
  if (!request.contains("active")) refuse("active: expected true or false");
  std::optional<size_t> position;
  if (request.contains("position")) position = request["position"].get<size_t>();
  api.packs.set_active(asked.id, request["active"].get<bool>(), position);
  return json_reply(api.packs.describe(asked.id));
}

// Folders go as one uncompressed tar archive.
std::string tar(const fs::path& folder) {
  std::string archive;
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file()) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  for (const auto& file : files) {
    const std::string bytes = read_file(file), name = (folder.filename() / fs::relative(file, folder)).string();
    std::string head(512, '\0');
    const auto put = [&](size_t at, const std::string& text) { head.replace(at, text.size(), text); };
    char size[16];
    std::snprintf(size, sizeof size, "%011zo", bytes.size());
    put(0, name.substr(0, 99));
    put(100, "0000644");
    put(108, "0000000");
    put(116, "0000000");
    put(124, size);
    put(136, "00000000000");
    put(148, "        ");
    put(156, "0");
    put(257, "ustar");
    put(263, "00");
    unsigned sum = 0;
    for (const unsigned char c : head) sum += c;
    std::snprintf(size, sizeof size, "%06o", sum);
    put(148, std::string(size) + '\0' + " ");
    archive += head + bytes + std::string((512 - bytes.size() % 512) % 512, '\0');
  }
  return archive + std::string(1024, '\0');
}

Reply download(Api& api, const Request& asked) {
  const auto found = asked.query.find("as");
  const std::string as = found == asked.query.end() ? "pack" : found->second;
  const PackSet packs = api.packs.named({asked.id});
  if (as != "pack" && as != "peft" && as != "lora" && as != "gguf") refuse("as: expected pack, peft, lora or gguf");
  const std::string end = as == "pack" ? ".safetensors" : as == "peft" ? ".tar" : as == "lora" ? ".lora.gguf" : ".gguf";
  Reply reply{.type = "application/octet-stream",
              .headers = {{"Content-Disposition", "attachment; filename=\"" + asked.id + end + "\""}}};
  if (as == "pack") {
    reply.body = read_file(api.packs.file(asked.id));
    return reply;
  }
  static std::atomic<int> number{0};
  const fs::path folder = api.scratch / ("download-" + std::to_string(++number)),
                 out = folder / (asked.id + (as == "peft" ? "" : end));
  fs::create_directories(folder);
  const workflow::Handles lent;
  const auto& format = workflow::save_format(as);
  std::exception_ptr failed;
  try {
    api.engine.with({}, [&](models::Model& model, const auto&) {
      if (format.check) format.check(model, "as");
      (void)format.write({.model = model, .pack = *packs[0].pack, .out = out, .lent = lent});
    });
    reply.body = as == "peft" ? tar(out) : read_file(out);
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

constexpr const char* kCompletion =
    R"("model":{"type":"string"},"max_tokens":{"type":"integer"},"temperature":{"type":"number"},"top_p":{"type":"number"},
"seed":{"type":"integer"},"stop":{},"n":{"type":"integer"},"stream":{"type":"boolean"},"stream_options":{"type":"object"},"logprobs":{})";
constexpr const char* kEdit =
    R"("facts":{"description":"list of facts in any format that memit_edit reads, or a file as text"},"editor":{"type":"string"},
"name":{"type":"string"},"settings":{"type":"object"},"hparams":{"type":"string"},"seed":{"type":"integer"},"eval":{"type":"array"},
"format":{"type":"string"},"active":{"type":"boolean"})";

Reply text_reply(std::string_view text, const char* type) {
  return {.body = std::string(text), .type = type};
}

}  // namespace

std::vector<Route> api_routes(Api& api) {
  const std::string completion = kCompletion;
  std::vector<Route> routes = {
      {"POST", "/v1/chat/completions", "the next turn of a conversation",
       completion + R"(,"messages":{"type":"array"},"top_logprobs":{"type":"integer"})", false,
       [&](const Request& r) { return api.completions.complete(r, true); }},
      {"POST", "/v1/completions", "how a text goes on", completion + R"(,"prompt":{},"echo":{"type":"boolean"})", false,
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
       R"("active":{"type":"boolean"},"position":{"type":"integer"},"strength":{"type":"number"})", false,
       [&](const Request& r) { return patch_pack(api, r); }},
      {"DELETE", "/v1/packs/{name}", "remove a pack for good", "", false,
       [&](const Request& r) {
         api.packs.remove(r.id);
         return json_reply({{"name", r.id}, {"deleted", true}});
       }},
      {"GET", "/v1/packs/{name}/file", "download: ?as=pack, peft (tar), lora or gguf", "", false,
       [&](const Request& r) { return download(api, r); }},
      {"POST", "/v1/probe", "probabilities and continuations without and with packs",
       R"("prompts":{"type":"array"},"packs":{"type":"array"},"max_tokens":{"type":"integer"})", false,
       [&](const Request& r) { return probe(api, r); }},
      {"POST", "/v1/trace", "causal trace of one prompt",
       R"("prompt":{"type":"string"},"subject":{"type":"string"},"packs":{"type":"array"},"samples":{"type":"integer"})",
       false, [&](const Request& r) { return trace(api, r); }},
      {"POST", "/v1/lint", "mistakes in a file of facts, by line", R"("facts":{},"format":{"type":"string"})", false,
       lint},
      {"GET", "/healthz", "whether the server is there", "", true,
       [&](const Request&) { return json_reply(health(api)); }},
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
    std::string method = route.method;
    std::transform(method.begin(), method.end(), method.begin(), [](unsigned char c) { return std::tolower(c); });
    ordered_json operation = {
        {"summary", route.summary},
        {"responses",
         {{"200", {{"description", "OK"}}}, {"default", {{"description", "an error object as OpenAI's"}}}}}};
    if (!route.request.empty())
      operation["requestBody"] = {
          {"content",
           {{"application/json",
             {{"schema", {{"type", "object"}, {"properties", ordered_json::parse("{" + route.request + "}")}}}}}}}};
    if (const size_t begin = route.path.find('{'); begin != std::string::npos)
      operation["parameters"] = {{{"name", route.path.substr(begin + 1, route.path.find('}') - begin - 1)},
                                  {"in", "path"},
                                  {"required", true},
                                  {"schema", {{"type", "string"}}}}};
    if (!route.open) operation["security"] = {{{"token", ordered_json::array()}}};
    paths[route.path][method] = std::move(operation);
  }
  return {{"openapi", "3.1.0"},
          {"info", {{"title", "emend serve"}, {"version", "1"}}},
          {"paths", paths},
          {"components", {{"securitySchemes", {{"token", {{"type", "http"}, {"scheme", "bearer"}}}}}}}};
}

}  // namespace emend::tools::serve
