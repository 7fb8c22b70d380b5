#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <emend/core/mapped.h>
#include <emend/core/text.h>
#include <emend/models/gguf/detail/gguf_tensors.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

namespace emend::models::detail {
namespace {

int64_t row_count(const GgufTensor& tensor) {
  return tensor.shape.size() == 1 ? tensor.shape[0] : tensor.rows();
}

/// Recipes that have no pieces yet, one for each tensor of the family's table.
std::vector<GgufRecipe> new_recipes(const GgufForm& form, const FamilySpec& family, const ModelConfig& config) {
  std::map<Part, std::shared_ptr<const std::vector<int64_t>>> orders;  // shared by all layers
  std::vector<GgufRecipe> recipes;
  for (ExpectedTensor& expected : expected_tensors(family, config)) {
    const auto [order, is_new] = orders.try_emplace(expected.part);
    if (is_new)
      if (auto rows = gguf_row_order(form, config, expected.part); !rows.empty())
        order->second = std::make_shared<const std::vector<int64_t>>(std::move(rows));
    GgufRecipe& recipe = recipes.emplace_back();
    recipe.info.name = expected.name;
    recipe.info.shape = expected.shape;
    recipe.transposed = is_transposed(family, expected);
    recipe.plus_one = is_stored_plus_one(config, expected);
    recipe.order = order->second;
    recipe.expected = std::move(expected);
  }
  return recipes;
}

/// Where row r of our tensor is stored: the piece, and the row of its source.
std::pair<const GgufPiece&, int64_t> place_of(const GgufRecipe& recipe, int64_t r) {
  int64_t from = recipe.order ? (*recipe.order)[r] : r;
  size_t p = 0;
  while (from >= recipe.pieces[p].rows) from -= recipe.pieces[p++].rows;
  return {recipe.pieces[p], recipe.pieces[p].first_row + from};
}

/// Finds what the tensors of one model are made of.
class Planner {
 public:
  Planner(const GgufFiles& files, const GgufForm& form, const FamilySpec& family, const ModelConfig& config)
      : files_(files), form_(form), family_(family), config_(config) {}

  std::vector<GgufRecipe> plan() {
    refuse_absurd_counts();
    std::vector<GgufRecipe> recipes;
    for (GgufRecipe& recipe : new_recipes(form_, family_, config_)) {
      recipe.pieces = find_pieces(recipe.expected);
      if (recipe.pieces.empty()) continue;
      check_shape(recipe);
      describe(recipe);
      for (const GgufPiece& piece : recipe.pieces) used_.insert(piece.source.tensor->name);
      recipes.push_back(std::move(recipe));
    }
    refuse_leftovers();
    return recipes;
  }

 private:
  // The table below is written out once a layer and expert; a file cannot ask for more than it has tensors.
  void refuse_absurd_counts() const {
    size_t tensors = 0;
    for (const auto& part : files_.parts()) tensors += part->tensors().size();
    const std::string prefix = form_.architecture + ".";
    if (config_.n_layers > static_cast<int64_t>(tensors))
      files_.metadata().fail_key(prefix + "block_count", std::to_string(config_.n_layers),
                                 "no more blocks than the file has tensors, " + std::to_string(tensors));
    if (config_.n_experts > 1024)
      files_.metadata().fail_key(prefix + "expert_count", std::to_string(config_.n_experts), "at most 1024");
  }

  [[nodiscard]] std::vector<GgufPiece> find_all(const std::vector<std::string>& names,
                                                const std::string& suffix) const {
    std::vector<GgufPiece> pieces;
    for (const std::string& name : names) {
      const LocatedTensor located = files_.find(name + suffix);
      if (!located) return {};
      pieces.push_back({located, 0, row_count(*located.tensor)});
    }
    return pieces;
  }

  [[nodiscard]] std::vector<GgufPiece> find_pieces(const ExpectedTensor& expected) const {
    const std::string suffix = expected.bias ? ".bias" : ".weight";
    const std::vector<std::string> names = gguf_names(form_, config_, expected);
    if (expected.expert >= 0) return find_expert(expected, names.front());
    if (auto pieces = find_all(names, suffix); !pieces.empty()) return pieces;
    const std::string block = "blk." + std::to_string(expected.layer) + ".";
    const int64_t q = config_.n_heads * config_.head_dim, k = config_.n_kv_heads * config_.head_dim;
    if (expected.part == Part::kQkv)  // the other way of storing it: apart, or as one
      return find_all(names.size() == 1 ? std::vector<std::string>{block + "attn_q", block + "attn_k", block + "attn_v"}
                                        : std::vector<std::string>{block + "attn_qkv"},
                      suffix);
    if (expected.part != Part::kQ && expected.part != Part::kK && expected.part != Part::kV) return {};
    const LocatedTensor fused = files_.find(block + "attn_qkv" + suffix);
    if (!fused || row_count(*fused.tensor) != q + 2 * k) return {};
    if (expected.part == Part::kQ) return {{fused, 0, q}};
    return {{fused, expected.part == Part::kK ? q : q + k, k}};
  }

  // A slice of the stacked tensor, or, in files of 2023, a tensor of its own.
  [[nodiscard]] std::vector<GgufPiece> find_expert(const ExpectedTensor& expected, const std::string& stacked) const {
    const std::string suffix = expected.bias ? ".bias" : ".weight";
    if (const LocatedTensor located = files_.find(stacked + suffix)) {
      const std::vector<int64_t>& shape = located.tensor->shape;
      if (shape.size() != 3 || shape[0] != config_.n_experts) fail_shape(*located.tensor, "one matrix an expert");
      return {{located, expected.expert * shape[1], shape[1]}};
    }
    const std::string old =
        stacked.substr(0, stacked.size() - std::string("_exps").size()) + "." + std::to_string(expected.expert);
    return find_all({old}, suffix);
  }

  [[noreturn]] void fail_shape(const GgufTensor& tensor, const std::string& expected) const {
    throw Error(ErrorClass::kCorruption,
                {files_.metadata().path().string() + ": tensor " + tensor.name, "shape " + shape_text(tensor.shape),
                 expected, "the file is damaged, or its metadata belong to another model"});
  }

  void check_shape(const GgufRecipe& recipe) const {
    std::vector<int64_t> wanted = recipe.expected.shape;
    if (recipe.transposed) std::ranges::reverse(wanted);
    int64_t rows = 0;
    for (const GgufPiece& piece : recipe.pieces) {
      const GgufTensor& tensor = *piece.source.tensor;
      rows += piece.rows;
      const bool matrix = wanted.size() == 2;
      if ((tensor.shape.size() > 1) != matrix || (matrix && tensor.row_values() != wanted[1]))
        fail_shape(tensor, shape_text(wanted) + " for " + recipe.expected.name);
    }
    if (rows != wanted[0])
      fail_shape(*recipe.pieces.front().source.tensor, shape_text(wanted) + " for " + recipe.expected.name);
    if (recipe.order && static_cast<int64_t>(recipe.order->size()) != rows)
      fail_shape(*recipe.pieces.front().source.tensor, std::to_string(recipe.order->size()) + " rows of heads");
  }

  static void describe(GgufRecipe& recipe) {
    const GgmlType type = recipe.pieces.front().source.tensor->type;
    const bool same =
        std::ranges::all_of(recipe.pieces, [&](auto& piece) { return piece.source.tensor->type == type; });
    recipe.info.dtype = same && !recipe.plus_one ? plain_dtype(type).value_or(at::kFloat) : at::kFloat;
  }

  void refuse_leftovers() const {
    const std::string prefix = form_.architecture + ".";
    const int64_t blocks = files_.metadata().integer(prefix + "block_count").value_or(config_.n_layers);
    const auto is_extra_block = [&](const std::string& name) {  // blocks for predicting several tokens at once
      for (int64_t block = config_.n_layers; block < std::min(blocks, config_.n_layers + 16); ++block)
        if (name.starts_with("blk." + std::to_string(block) + ".")) return true;
      return false;
    };
    for (const auto& part : files_.parts())
      for (const GgufTensor& tensor : part->tensors())
        if (!used_.count(tensor.name) && !is_rotary_table(tensor.name) && !is_extra_block(tensor.name))
          throw Error(ErrorClass::kUnsupported, {part->path().string(),
                                                 "tensor \"" + tensor.name + "\" " + shape_text(tensor.shape) +
                                                     " has no place in a " + form_.architecture + " model",
                                                 "the tensors of family " + family_.name,
                                                 "use the model's Hugging Face checkpoint if its family is supported"});
  }

  const GgufFiles& files_;
  const GgufForm& form_;
  const FamilySpec& family_;
  const ModelConfig& config_;
  std::set<std::string> used_;
};

// Lets go of the mapped pages that lie wholly in [data, data + bytes); they are read again when they are needed.
void release_pages(const std::byte* data, size_t bytes) {
  static const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (begin < end) (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

// Stored values as they are. A copy: models are edited in place, and a view of the mapping would change what the
// checkpoint, and every other model of it, takes for the original.
at::Tensor copy_of(const GgufRecipe& recipe) {
  const GgufPiece& piece = recipe.pieces.front();
  const GgufTensor& tensor = *piece.source.tensor;
  const std::byte* data =
      piece.source.file->data(tensor) + tensor.bytes / static_cast<uint64_t>(row_count(tensor)) * piece.first_row;
  at::Tensor copy = at::empty(recipe.info.shape, at::TensorOptions().dtype(recipe.info.dtype));
  std::memcpy(copy.mutable_data_ptr(), data, copy.nbytes());
  release_pages(data, copy.nbytes());
  return copy;
}

// A vector: its pieces in full, then the rows asked for.
at::Tensor read_vector(const GgufRecipe& recipe) {
  std::vector<at::Tensor> parts;
  for (const GgufPiece& piece : recipe.pieces) {
    const GgufTensor& tensor = *piece.source.tensor;
    at::Tensor values = at::empty({tensor.shape[0]}, at::kFloat);
    dequantise_row(tensor.type, piece.source.file->data(tensor), values.mutable_data_ptr<float>(), tensor.shape[0]);
    parts.push_back(values.narrow(0, piece.first_row, piece.rows));
  }
  at::Tensor values = at::cat(parts);
  if (recipe.order) values = values.index_select(0, at::tensor(*recipe.order, at::kLong));
  if (recipe.plus_one) values.sub_(1);
  return values.to(recipe.info.dtype);
}

at::Tensor read_matrix(const GgufRecipe& recipe) {
  std::vector<int64_t> shape = recipe.expected.shape;
  if (recipe.transposed) std::ranges::reverse(shape);
  const int64_t rows = shape[0], columns = shape[1];
  at::Tensor result = at::empty(shape, at::TensorOptions().dtype(recipe.info.dtype));
  const bool same_type = std::ranges::all_of(recipe.pieces, [&](const GgufPiece& piece) {
    return plain_dtype(piece.source.tensor->type) == recipe.info.dtype;
  });
  const size_t out_bytes = columns * result.element_size();
  auto* out = static_cast<char*>(result.mutable_data_ptr());
  at::parallel_for(0, rows, std::max<int64_t>(1, 32768 / columns), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const auto [piece, from] = place_of(recipe, r);
      const GgmlType type = piece.source.tensor->type;
      const std::byte* row = piece.source.file->data(*piece.source.tensor) + row_bytes(type, columns) * from;
      if (same_type)
        std::memcpy(out + out_bytes * r, row, out_bytes);
      else
        dequantise_row(type, row, reinterpret_cast<float*>(out + out_bytes * r), columns);
    }
  });
  return recipe.transposed ? result.t().contiguous() : result;
}

at::Tensor in_file_form(const GgufRecipe& recipe, at::Tensor values) {
  values = values.to(at::kFloat);
  if (recipe.transposed) values = values.t();
  if (recipe.plus_one) values = values + 1;
  return values.contiguous();
}

}  // namespace

std::vector<GgufRecipe> plan_tensors(const GgufFiles& files, const GgufForm& form, const FamilySpec& family,
                                     const ModelConfig& config) {
  return Planner(files, form, family, config).plan();
}

at::Tensor read_tensor(const GgufRecipe& recipe) {
  if (recipe.is_plain() && plain_dtype(recipe.pieces.front().source.tensor->type)) return copy_of(recipe);
  if (recipe.expected.shape.size() == 1) return read_vector(recipe);
  EMEND_CHECK(!recipe.plus_one, "only vectors are shifted");
  return read_matrix(recipe);
}

GgufLayout new_layout(const GgufForm& form, const FamilySpec& family, const ModelConfig& config) {
  GgufLayout layout;
  std::map<std::string, GgufTensor*> stacks;
  layout.recipes = new_recipes(form, family, config);
  for (GgufRecipe& recipe : layout.recipes) {
    const ExpectedTensor& expected = recipe.expected;
    std::vector<int64_t> shape = expected.shape;
    if (recipe.transposed) std::ranges::reverse(shape);
    const auto names = gguf_names(form, config, expected);
    const auto rows = gguf_rows(config, names.size(), shape[0]);
    for (size_t i = 0; i < names.size(); ++i) {
      const std::string name = names[i] + (expected.bias ? ".bias" : ".weight");
      if (expected.expert >= 0) {
        GgufTensor*& stack = stacks[name];
        if (!stack)
          stack =
              &layout.tensors.emplace_back(GgufTensor{name, GgmlType::kF32, {config.n_experts, shape[0], shape[1]}});
        recipe.pieces.push_back({{nullptr, stack}, expected.expert * shape[0], shape[0]});
      } else {
        std::vector<int64_t> cut = shape;
        cut[0] = rows[i];
        const GgufTensor& tensor = layout.tensors.emplace_back(GgufTensor{name, GgmlType::kF32, std::move(cut)});
        recipe.pieces.push_back({{nullptr, &tensor}, 0, rows[i]});
      }
    }
  }
  return layout;
}

at::Tensor assemble(const GgufTensor& target, const std::vector<const GgufRecipe*>& users,
                    const std::function<at::Tensor(const std::string&)>& read) {
  if (users.size() == 1 && users[0]->pieces.size() == 1 && !users[0]->order && users[0]->pieces[0].first_row == 0)
    return in_file_form(*users[0], read(users[0]->expected.name));
  const int64_t rows = row_count(target);
  at::Tensor result =
      target.shape.size() > 1 ? at::empty({rows, target.row_values()}, at::kFloat) : at::empty({rows}, at::kFloat);
  int64_t covered = 0;
  for (const GgufRecipe* recipe : users) {
    const at::Tensor values = in_file_form(*recipe, read(recipe->expected.name));
    std::vector<int64_t> ours, theirs;
    for (int64_t r = 0; r < values.size(0); ++r) {
      const auto [piece, from] = place_of(*recipe, r);
      if (piece.source.tensor != &target) continue;
      ours.push_back(r);
      theirs.push_back(from);
    }
    covered += std::ssize(ours);
    result.index_copy_(0, at::tensor(theirs, at::kLong), values.index_select(0, at::tensor(ours, at::kLong)));
  }
  EMEND_CHECK(covered == rows, "recipes cover " + target.name);
  return result;
}

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
    refuse({first.string(), "the first of " + std::to_string(parts) + " parts under another name",
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
    first.fail_key("split.count", std::to_string(parts), "0 to " + std::to_string(kMaxParts));
  if (parts <= 1) return;  // 0 is what llama.cpp's tool writes into merged files
  if (const int64_t number = first.integer("split.no").value_or(0); number != 0)
    refuse({path.string(), "part " + std::to_string(number + 1) + " of " + std::to_string(parts), "the first part",
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
  size_t tensors = 0;
  for (int64_t i = 0; i < parts; ++i) {
    const GgufFile& part = *parts_[static_cast<size_t>(i)];
    tensors += part.tensors().size();
    for (const auto& [key, expected] : {std::pair("split.no", i), {"split.count", parts}})
      if (const auto said = part.integer(key); said && *said != expected)
        part.fail_key(key, std::to_string(*said), std::to_string(expected) + ", as the file's name says");
  }
  if (const auto said = first.integer("split.tensors.count"); said && *said != static_cast<int64_t>(tensors))
    first.fail_key("split.tensors.count", std::to_string(*said),
                   std::to_string(tensors) + ", the tensors of all parts");
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
  return mapped(row, shortest_decimal);
}

}  // namespace emend::models::detail
