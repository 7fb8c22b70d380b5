// serve: answers and edits over HTTP, and a page for people.
#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/core/staged.h>
#include <emend/workflow/inputs.h>
#include <emend/workflow/packs.h>
#include <emend/workflow/preflight.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <future>
#include <iostream>
#include <optional>

#include "../options.h"
#include "../serve/api.h"

namespace emend::tools {
namespace {

namespace fs = std::filesystem;

struct ServeArguments {
  workflow::RunOptions edit;
  std::string packs;
  serve::HttpOptions http;
  serve::EngineOptions engine;
  serve::CompletionLimits limits;
  int64_t cache_mib = 1024;
};

void check(ServeArguments& options) {
  if (const char* token = std::getenv("EMEND_TOKEN"); token && options.http.token.empty()) options.http.token = token;
  if (!serve::is_loopback(options.http.host) && options.http.token.empty())
    refuse({setting("host", options.http.host), "an address that others can reach, without a token",
            setting("token") + " or EMEND_TOKEN", "set a token, or listen on 127.0.0.1"});
  if (options.http.host.find_first_of("\r\n") != std::string::npos ||
      options.http.token.find_first_of("\r\n") != std::string::npos)
    refuse({setting("token"), "a line break", "one line", ""});
  options.engine.cache_bytes = options.cache_mib << 20;
  options.edit.save = {"pack"};
  options.edit.show = 5;
}

// "smollm2+x" names a model and packs by its "+": a base has none, and nothing that an address would have to escape.
std::string base_name(const models::Checkpoint& checkpoint) {
  std::string name = workflow::short_model_name(checkpoint);
  for (char& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '.' && c != '_') c = '-';
  return name;
}

void require_metrics(const std::vector<std::string>& names, const datasets::FactSet& facts) {
  for (const auto& name : evaluation::resolve_metrics(names, facts))
    if (name == "health")
      refuse({setting("eval", name), "a measurement that needs files of its own", "one of the facts",
              "measure it with memit_edit"});
}

// What of a request can be seen to be wrong before a job is made of it. Where an editor can take care of replies, it
// does: people talk to a server.
void prepare_edit(workflow::RunOptions& edit, const models::Model& model, const datasets::FactSet& facts) {
  const auto& editor = workflow::chosen_editor(edit, &model.checkpoint());
  require_metrics(edit.metrics.names, facts);
  const auto hparams = [&] { return workflow::find_hparams(editor.name, edit.hparams, edit.set, model.checkpoint()); };
  const auto values = editor.effective(hparams(), Log());
  if (values.value("chat_weight", 1.0) == 0 && !model.tokenizer().chat_template().empty() &&
      std::ranges::none_of(edit.set, [](const std::string& one) { return one.starts_with("chat_weight="); }))
    edit.set.emplace_back("chat_weight=1");
  (void)editor.make(hparams(), model, Log());
  for (const auto& finding : datasets::lint_facts(facts))
    if (finding.severity == datasets::Severity::kError)
      refuse({finding.where, finding.text, "facts that can be true together", "POST /v1/lint shows all"});
}

int run_serve(const ServeArguments& given, Common& common) {
  ServeArguments options = given;
  check(options);
  const auto checkpoint = open_named(options.edit.model);
  require_metrics(options.edit.metrics.names, {});
  workflow::require_statistics(options.edit, *checkpoint);
  const auto& chosen = workflow::chosen_editor(options.edit, checkpoint.get());
  if (!options.edit.editor.empty() || !options.edit.hparams.empty())
    (void)chosen.effective(workflow::find_hparams(chosen.name, options.edit.hparams, options.edit.set, *checkpoint),
                           Log());
  if (!options.edit.hparams.empty()) options.edit.editor = chosen.name;
  serve::HttpServer server(options.http);
  auto model = load_named(checkpoint, options.edit.model, common);
  if (model.tokenizer().chat_template().empty())
    (void)models::chat_format_of(model.tokenizer(), options.limits.chat_format, common.log);
  const workflow::Packs beside(model);  // what the model folder's own ledger holds beside the weights
  std::optional<TemporaryFolder> own;
  if (options.packs.empty()) own.emplace("packs", "name one with " + setting("packs"));
  const fs::path place = own ? own->path() : fs::path(options.packs);
  serve::PackFolder packs(place, model, common.log);
  workflow::Handles lent;
  const auto load = [&] { return load_named(checkpoint, options.edit.model, common); };
  serve::Engine engine(model, options.engine);
  serve::Completions completions(engine, packs, base_name(*checkpoint), options.limits, beside.runtime());
  const fs::path work = place / ".emend-serve";
  const auto prepare = [&](auto& edit, const auto& facts) { prepare_edit(edit, model, facts); };
  serve::Jobs jobs(load, prepare, packs, work, options.edit, lent);
  serve::Api api{engine, packs, jobs, completions, work, common.log};
  // The fields of a request, from here on.
  spell_settings([](std::string_view name) -> std::string {
    if (name == "chat_format") return "--chat-format of emend serve";  // no request has it
    return name == "set" ? "\"settings\"" : "\"" + std::string(name) + "\"";
  });
  api.http_metrics = [&] { return server.metrics(); };
  common.cancel.check("serve");
  auto serving = std::async(std::launch::async, [&] { server.serve(serve::api_routes(api)); });
  const std::string host =
      options.http.host.find(':') == std::string::npos ? options.http.host : "[" + options.http.host + "]";
  std::cout << "listening on http://" << host << ":" << server.port() << std::endl;
  while (!common.cancel.requested() && serving.wait_for(std::chrono::milliseconds(50)) != std::future_status::ready) {
  }
  common.log.info("serve.stop", "stopping: what runs is cancelled, packs stay as they are");
  engine.stop();
  jobs.stop();
  while (!server.running() && serving.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
  }
  server.stop();
  serving.get();
  return 0;
}

}  // namespace

VerbRun setup_serve(Options& o) {
  auto& options = o.arguments<ServeArguments>();
  auto& edit = options.edit;
  add_model_options(o, edit.model);
  o.add("--packs", &options.packs,
        "folder of edit packs and of which are in force; default: one that goes when the server stops",
        {.type = "DIR"});
  o.group("Network")
      .add("--host", &options.http.host, "address to listen on; another than the loopback needs --token",
           {.type = "ADDRESS"})
      .add("--port", &options.http.port, "port; 0 picks one", {.limits = {0, 65535}})
      .add("--token", &options.http.token,
           "what clients must send as Authorization: Bearer TOKEN; default: $EMEND_TOKEN", {.type = "TOKEN"})
      .add("--connections", &options.http.threads, "connections that are served at once", {.limits = {2, 4096}});
  o.group("Limits")
      .add("--rows", &options.engine.rows, "texts that are continued together", {.limits = {1, 1024}})
      .add("--queue", &options.engine.queue, "texts that wait; more are refused (429)", {.limits = {0, 1 << 20}})
      .add("--kv-cache", &options.cache_mib, "MiB of keys and values", {.limits = {1, 1 << 30}})
      .add("--max-tokens", &options.limits.max_tokens, "new tokens of an answer", {.limits = kPositive})
      .add("--chat-format", &options.limits.chat_format, "how turns are written; default: told by the model's template",
           {.type = "NAME", .choices = models::chat_format_names()})
      .add("--timeout", &options.limits.timeout_s, "seconds for an answer", {.limits = {1, 1 << 30}});
  o.group("Edits")
      .add("--editor", &edit.editor, "method where a request names none",
           {.type = "NAME", .shown = "latch where it has a preset for the model, else memit"})
      .add("--hparams", &edit.hparams, "hyper-parameters where a request names none: a file or a preset's name",
           {.type = "FILE|NAME"})
      .add("--corpus", &edit.corpus, "text for the key statistics; default: text sampled from the model itself",
           {.type = "FILE", .excludes = "--stats-import"})
      .add("--eval", &edit.metrics.names, "metrics where a request names none", {.type = "LIST", .list = true});
  add_stats_amount_options(o.group("Edits"), edit);
  add_cache_option(o.group("Edits"), edit.metrics.cache, "folder of cached statistics and evaluations");
  o.footer =
      "Examples:\n"
      "  emend serve --packs my-packs                    then open http://127.0.0.1:8080\n"
      "  EMEND_TOKEN=secret emend serve --host 0.0.0.0 --packs my-packs";
  return [&options](Common& common) { return run_serve(options, common); };
}

}  // namespace emend::tools
