// convert: a model between a Hugging Face folder and a GGUF file.
#include <emend/core/error.h>
#include <emend/models/gguf/convert.h>

#include <chrono>
#include <iostream>

#include "../model_options.h"
#include "../run_directory.h"

namespace emend::tools {
namespace {

struct Options {
  std::string source, target, format = "auto", type, shard_size = "5GB";
  bool no_tokenizer = false, force = false;
};

constexpr const char* kExamples = R"(Examples:
  emend convert models/gpt2-xl gpt2-xl.gguf --type F16      folder to GGUF
  emend convert gpt2-xl.gguf models/gpt2-xl-again           and back, with its tokenizer
  emend convert models/llama llama-bf16 --type bfloat16     folder to folder in another dtype
  emend convert llama-f16.gguf llama-q8.gguf --type Q8_0    GGUF to GGUF in another type

Types: F32, F16, BF16 for a folder; for GGUF also Q8_0, Q6_K, Q5_K, Q5_1, Q5_0, Q4_K, Q4_1, Q4_0, Q3_K, Q2_K, IQ4_NL
and IQ4_XS. In GGUF vectors and norms stay F32, as llama.cpp keeps them.
The target appears complete or not at all. What the target cannot hold is said in a note.)";

// "5GB", "500MB", "1.5GiB", "1000000".
uint64_t parse_bytes(const std::string& text) {
  static const std::map<std::string, double> kUnits = {{"", 1},       {"B", 1},         {"KB", 1e3},
                                                       {"MB", 1e6},   {"GB", 1e9},      {"TB", 1e12},
                                                       {"KIB", 1024}, {"MIB", 1 << 20}, {"GIB", 1 << 30}};
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  std::string unit;
  for (const char* c = end; *c; ++c)
    if (*c != ' ') unit += static_cast<char>(std::toupper(static_cast<unsigned char>(*c)));
  const auto found = kUnits.find(unit);
  if (end == text.c_str() || found == kUnits.end() || !(number * found->second >= 1) || number * found->second > 1e18)
    throw Error(ErrorClass::kInvalidArgument,
                {"--shard-size", "\"" + text + "\"", "a size such as 5GB, 500MB or 2GiB", ""});
  return static_cast<uint64_t>(number * found->second);
}

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

void print(const nlohmann::ordered_json& document) {
  std::cout << document["target"].get<std::string>() << ": " << document["tensors"] << " tensors (";
  bool first = true;
  for (const auto& [type, count] : document["types"].items()) {
    std::cout << (first ? "" : ", ") << count << " " << type;
    first = false;
  }
  std::cout << "), " << static_cast<double>(document["bytes"].get<uint64_t>()) / 1e6 << " MB\n";
  for (const auto& file : document["files"]) std::cout << "  " << file.get<std::string>() << '\n';
  for (const auto& note : document["notes"]) std::cout << "note: " << note.get<std::string>() << '\n';
}

}  // namespace

VerbRun setup_convert(CLI::App& command) {
  auto options = std::make_shared<Options>();
  command
      .add_option("SOURCE,--model", options->source, "model folder, GGUF file or ORG/NAME in the Hugging Face cache")
      ->required()
      ->type_name("MODEL");
  command.add_option("TARGET,--out", options->target, "folder, or a name that ends in .gguf")
      ->required()
      ->type_name("PATH");
  command
      .add_option("--type,--dtype", options->type,
                  "type of the matrices (below); default: as in the source, F32 where a folder cannot hold it")
      ->type_name("TYPE");
  command.add_option("--format", options->format, "auto (by the target's name), hf or gguf")
      ->check(CLI::IsMember({"auto", "hf", "huggingface", "gguf"}))
      ->type_name("FORMAT");
  command.add_option("--shard-size", options->shard_size, "largest weight file of a folder")->type_name("SIZE");
  command.add_flag("--no-tokenizer", options->no_tokenizer, "leave the tokenizer out");
  command.add_flag("--force", options->force, "replace a model that is already at the target");
  command.footer(kExamples);
  return [options](Common& common) {
    models::ConvertOptions convert;
    convert.format = models::parse_model_format(options->format);
    convert.type = options->type;
    convert.vocabulary = !options->no_tokenizer;
    convert.shard_bytes = parse_bytes(options->shard_size);
    convert.overwrite = options->force;
    convert.log = &common.log;
    convert.progress = [&common](const ProgressUpdate& update) {
      if (common.cancel.requested())
        throw Error(ErrorClass::kCancelled,
                    {"convert", "interrupted", "", "nothing was written under the target's name; run again"});
      if (common.progress) common.progress(update);
    };
    const auto begin = std::chrono::steady_clock::now();
    const auto report = models::convert_model(options->source, options->target, convert);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const auto document = to_json(report, options->source, options->target, seconds);
    if (common.json)
      std::cout << dump_json(document) << '\n';
    else
      print(document);
    return 0;
  };
}

}  // namespace emend::tools
