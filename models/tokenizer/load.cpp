#include <emend/core/error.h>
#include <emend/models/tokenizer/detail/sources.h>

#include <system_error>

namespace emend::models {

std::unique_ptr<Tokenizer> load_tokenizer(const std::filesystem::path& folder) {
  using namespace detail;
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error))
    throw Error(ErrorClass::kNotFound,
                {folder.string(), "no such folder", "a folder with a tokenizer", "check the path"});
  const auto has = [&folder](const char* name) { return std::filesystem::is_regular_file(folder / name); };
  const FolderConfig config(folder);
  if (has("tokenizer.json")) {
    PipelineSpec spec = read_tokenizer_json(folder / "tokenizer.json");
    config.apply(spec);
    spec.files = config.files({"tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"});
    return make_pipeline(std::move(spec));
  }
  if (has("tokenizer.model")) {
    if (!looks_like_tiktoken(folder / "tokenizer.model")) return load_sentencepiece(folder / "tokenizer.model", config);
    PipelineSpec spec = read_tiktoken(folder / "tokenizer.model", config);
    spec.files = config.files({"tokenizer.model"});
    return make_pipeline(std::move(spec));
  }
  if (has("vocab.json") && has("merges.txt")) {
    PipelineSpec spec = read_vocab_and_merges(folder, config);
    spec.files = config.files({"vocab.json", "merges.txt"});
    return make_pipeline(std::move(spec));
  }
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".tiktoken") continue;
    PipelineSpec spec = read_tiktoken(entry.path(), config);
    spec.files = config.files({entry.path().filename().string()});
    return make_pipeline(std::move(spec));
  }
  throw Error(ErrorClass::kNotFound,
              {folder.string(), "no tokenizer in this folder",
               "tokenizer.json, tokenizer.model, vocab.json with merges.txt, or a .tiktoken file",
               "copy the tokenizer files of the model into the folder"});
}

}  // namespace emend::models
