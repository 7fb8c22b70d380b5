// convert: a model between a Hugging Face folder and a GGUF file.
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/devices/units.h>
#include <emend/editors/packs/ledger.h>
#include <emend/models/checkpoint.h>
#include <emend/models/gguf/convert.h>
#include <emend/models/gguf/ggml_type.h>
#include <emend/models/gguf/gguf_file.h>
#include <emend/models/gguf/gguf_writer.h>
#include <emend/workflow/card.h>

#include <chrono>
#include <sstream>

#include "../options.h"

namespace emend::tools {
namespace {

struct ConvertArguments {
  std::string source, target, format = "auto", type, shard_size;
  bool no_tokenizer = false, force = false;
  int64_t spare_neurons = 0;
};

constexpr const char* kConvertExamples = R"(Examples:
  emend convert models/gpt2-xl gpt2-xl.gguf --type F16      folder to GGUF
  emend convert gpt2-xl.gguf models/gpt2-xl-again           and back, with its tokenizer
  emend convert models/llama llama-bf16 --type bfloat16     folder to folder in another dtype
  emend convert llama-f16.gguf llama-q8.gguf --type Q8_0    GGUF to GGUF in another type
  emend convert model.gguf wide --spare-neurons 512         places for 1,500 edits by latch

Types: F32, F16, BF16 for a folder; for GGUF also Q8_0, Q6_K, Q5_K, Q5_1, Q5_0, Q4_K, Q4_1, Q4_0, Q3_K, Q2_K, IQ4_NL
and IQ4_XS. In GGUF vectors and norms stay F32, as llama.cpp keeps them.
The target appears complete or not at all. What the target cannot hold is said in a note.)";

nlohmann::ordered_json to_json(const models::ConvertReport& report, const std::string& source,
                               const std::string& target, double seconds) {
  nlohmann::ordered_json files = nlohmann::ordered_json::array();
  for (const auto& file : report.files) files.push_back(file.string());
  return {{"source", source},
          {"target", target},
          {"format", report.format == models::ModelFormat::kGguf ? "gguf" : "huggingface"},
          {"tensors", report.tensors},
          {"types", report.types},
          {"bytes", report.bytes},
          {"files", files},
          {"notes", report.notes},
          {"seconds", seconds}};
}

std::string conversion_text(const nlohmann::ordered_json& document) {
  std::ostringstream text;
  text << document["target"].get<std::string>() << ": " << document["tensors"] << " tensors ("
       << join(document["types"].items(), ", ", [](const auto& one) { return one.value().dump() + " " + one.key(); })
       << "), " << static_cast<double>(document["bytes"].get<uint64_t>()) / 1e6 << " MB\n";
  for (const auto& file : document["files"]) text << "  " << file.get<std::string>() << '\n';
  for (const auto& note : document["notes"]) text << "note: " << note.get<std::string>() << '\n';
  return text.str();
}

int run_convert(const ConvertArguments& options, const Common& common) {
  models::ConvertOptions convert;
  convert.format = models::parse_model_format(options.format);
  convert.type = options.type;
  convert.vocabulary = !options.no_tokenizer;
  if (!options.shard_size.empty()) {
    const int64_t bytes = devices::parse_bytes(options.shard_size, "--shard-size");
    if (bytes < 1) refuse({"--shard-size", "\"" + options.shard_size + "\"", "a size such as 5GB or 500MB", ""});
    convert.shard_bytes = bytes;
  }
  convert.overwrite = options.force;
  convert.spare_neurons = options.spare_neurons;
  std::vector<std::string> left_out;
  const auto source = models::open_checkpoint(options.source)->path();
  convert.edits = editors::edits_in_weights(source, left_out);
  size_t edits = convert.edits.size();
  if (std::filesystem::is_regular_file(source)) edits += models::GgufFile(source).texts(models::kGgufEdits).size();
  convert.log = &common.log;
  convert.progress = [&common](const ProgressUpdate& update) {
    if (common.cancel.requested())
      throw Error(ErrorClass::kCancelled,
                  {"convert", "interrupted", "", "nothing was written under the target's name; run again"});
    if (common.progress) common.progress(update);
  };
  if (options.force) warn_of_replaced(options.target, common.log);
  const auto begin = std::chrono::steady_clock::now();
  auto report = models::convert_model(options.source, options.target, convert);
  workflow::remove_card(options.target, common.log);
  report.notes.insert(report.notes.end(), left_out.begin(), left_out.end());
  if (edits > 0 && report.format == models::ModelFormat::kHuggingFace)
    report.notes.push_back("the source's edits (" + std::to_string(edits) +
                           ") are part of these weights without a ledger: emend list does not show them here, and "
                           "emend revert cannot take them out");
  const bool rounded = !options.type.empty() && report.format == models::ModelFormat::kGguf &&
                       !models::plain_dtype(models::parse_ggml_type(options.type));
  if (edits > 0 && rounded)
    report.notes.push_back("the source's edits (" + std::to_string(edits) + ") are rounded with the weights to " +
                           options.type + ": emend eval tells what is left of them");
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const auto document = to_json(report, options.source, options.target, seconds);
  common.print(document, conversion_text(document));
  return 0;
}

}  // namespace

VerbRun setup_convert(Options& o) {
  auto& options = o.arguments<ConvertArguments>();
  o.add("SOURCE,--model", &options.source, "model folder, GGUF file or ORG/NAME in the Hugging Face cache",
        {.type = "MODEL", .required = true})
      .add("TARGET,--out", &options.target, "folder, or a name that ends in .gguf", {.type = "PATH", .required = true})
      .add("--type,--dtype", &options.type,
           "type of the matrices (below); default: as in the source, F32 where a folder cannot hold it",
           {.type = "TYPE"})
      .add("--format", &options.format, "auto (by the target's name), hf or gguf",
           {.type = "FORMAT", .choices = {"auto", "hf", "huggingface", "gguf"}})
      .add("--shard-size", &options.shard_size, "largest weight file of a folder", {.type = "SIZE", .shown = "5GB"})
      .add(
          "--spare-neurons", &options.spare_neurons,
          "zero neurons to add to every MLP of a folder: the model stays as it is, and many edits by latch find places",
          {.type = "N", .limits = kNonNegative})
      .add("--no-tokenizer", &options.no_tokenizer, "leave the tokenizer out")
      .add("--force", &options.force, "replace a model that is already at the target");
  o.footer = kConvertExamples;
  return [&options](Common& common) { return run_convert(options, common); };
}

}  // namespace emend::tools
