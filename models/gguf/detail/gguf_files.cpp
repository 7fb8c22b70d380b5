#include <emend/core/text.h>
#include <emend/models/gguf/detail/gguf_files.h>

namespace emend::models::detail {
namespace {

constexpr int64_t kMaxParts = 1000;
constexpr int64_t kMaxSmallTensor = 1 << 16;

// "x-00001-of-00003.gguf" → "x-00002-of-00003.gguf".
std::filesystem::path part_path(const std::filesystem::path& first, int64_t part, int64_t parts) {
  const auto ending = [&](int64_t index) {
    return formatted("-%05d-of-%05d.gguf", static_cast<int>(index), static_cast<int>(parts));
  };
  const std::string name = first.filename().string();
  if (!name.ends_with(ending(1)))
    throw Error(ErrorClass::kInvalidArgument,
                {first.string(), "the first of " + std::to_string(parts) + " parts under another name",
                 "a name that ends in " + ending(1),
                 "give the parts their original names, or merge them with llama-gguf-split --merge"});
  const std::string stem = name.substr(0, name.size() - ending(1).size());
  return first.parent_path() / (stem + ending(part + 1));
}

}  // namespace

GgufFiles::GgufFiles(const std::filesystem::path& path) {
  parts_.push_back(std::make_shared<const GgufFile>(path));
  const GgufFile& first = *parts_.front();
  const int64_t parts = first.integer("split.count").value_or(1);
  if (parts < 0 || parts > kMaxParts)
    first.fail_key("split.count", std::to_string(parts), "at most " + std::to_string(kMaxParts));
  if (parts <= 1) return;
  if (const int64_t number = first.integer("split.no").value_or(0); number != 0)
    throw Error(ErrorClass::kInvalidArgument,
                {path.string(), "part " + std::to_string(number + 1) + " of " + std::to_string(parts), "the first part",
                 "name the file that ends in -00001-of-….gguf"});
  for (int64_t i = 1; i < parts; ++i) {
    parts_.push_back(std::make_shared<const GgufFile>(part_path(path, i, parts)));
    for (const GgufTensor& tensor : parts_.back()->tensors())
      for (size_t other = 0; other + 1 < parts_.size(); ++other)
        if (parts_[other]->find_tensor(tensor.name))
          throw Error(ErrorClass::kCorruption,
                      {parts_.back()->path().string(),
                       "tensor \"" + tensor.name + "\" is also in " + parts_[other]->path().filename().string(),
                       "parts that do not share tensors", "fetch the files again"});
  }
}

LocatedTensor GgufFiles::find(std::string_view name) const {
  for (const auto& part : parts_)
    if (const GgufTensor* tensor = part->find_tensor(name)) return {part.get(), tensor};
  return {};
}

std::vector<double> small_tensor(const LocatedTensor& located) {
  const GgufTensor& tensor = *located.tensor;
  const int64_t values = tensor.rows() * tensor.row_values();
  if (values > kMaxSmallTensor)
    throw Error(ErrorClass::kCorruption,
                {located.file->path().string() + ": tensor " + tensor.name, std::to_string(values) + " values",
                 "a rotary table", "fetch the file again"});
  std::vector<float> row(values);
  dequantise_row(tensor.type, located.file->data(tensor), row.data(), values);
  std::vector<double> result;
  for (const float value : row) result.push_back(shortest_decimal(value));
  return result;
}

}  // namespace emend::models::detail
