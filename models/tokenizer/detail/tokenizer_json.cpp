// Reading tokenizer.json. The vocabulary and the merges are by far the largest part of the file; they go straight
// from the parser into flat tables, and only the rest becomes a JSON tree.
#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/models/tokenizer/detail/checks.h>
#include <emend/models/tokenizer/detail/json_view.h>
#include <emend/models/tokenizer/detail/pipeline.h>

#include <nlohmann/json.hpp>
#include <utility>

namespace emend::models::detail {
namespace {

using nlohmann::json;

class Reader final : public nlohmann::json_sax<json> {
 public:
  explicit Reader(std::string file) : file_(std::move(file)) {}

  json root;
  std::vector<std::pair<std::string, uint32_t>> vocabulary;
  std::vector<std::pair<std::string, std::string>> merges;
  bool has_vocabulary = false, has_merges = false;  // the tree holds empty stand-ins

  bool null() override { return value(json(nullptr)); }
  bool boolean(bool v) override { return value(json(v)); }
  bool number_integer(number_integer_t v) override { return value(json(v)); }
  bool number_float(number_float_t v, const string_t&) override { return value(json(v)); }
  bool binary(binary_t&) override { return false; }

  bool number_unsigned(number_unsigned_t v) override {
    if (mode_ != Mode::kVocabulary) return value(json(v));
    if (v > static_cast<number_unsigned_t>(kMaxTokenId)) bad_vocabulary(std::to_string(v));
    vocabulary.emplace_back(std::move(key_), static_cast<uint32_t>(v));
    return true;
  }

  bool string(string_t& v) override {
    if (mode_ != Mode::kMerges) return value(json(std::move(v)));
    if (in_pair_) {
      (pair_size_++ == 0 ? pair_.first : pair_.second) = std::move(v);
      return true;
    }
    const size_t space = v.find(' ');
    if (space == std::string::npos || v.find(' ', space + 1) != std::string::npos) bad_merge("\"" + shorten(v) + "\"");
    merges.emplace_back(v.substr(0, space), v.substr(space + 1));
    return true;
  }

  bool key(string_t& k) override {
    key_ = std::move(k);
    return true;
  }

  bool start_object(size_t size) override {
    if (mode_ == Mode::kTree && in_model() && key_ == "vocab") {
      mode_ = Mode::kVocabulary;
      has_vocabulary = true;
      if (size != static_cast<size_t>(-1)) vocabulary.reserve(size);
      return value_in_tree(json::object());
    }
    if (mode_ != Mode::kTree) return value(json::object());
    return open(json::object());
  }

  bool start_array(size_t) override {
    if (mode_ == Mode::kMerges && !in_pair_) {
      in_pair_ = true;
      pair_size_ = 0;
      return true;
    }
    if (mode_ == Mode::kTree && in_model() && key_ == "merges") {
      mode_ = Mode::kMerges;
      has_merges = true;
      return value_in_tree(json::array());
    }
    if (mode_ != Mode::kTree) return value(json::array());
    return open(json::array());
  }

  bool end_object() override { return close(); }
  bool end_array() override {
    if (!in_pair_) return close();
    if (pair_size_ != 2) bad_merge("a list of " + std::to_string(pair_size_) + " strings");
    merges.push_back(std::move(pair_));
    in_pair_ = false;
    return true;
  }

  bool parse_error(size_t, const std::string&, const json::exception&) override { return false; }

 private:
  enum class Mode { kTree, kVocabulary, kMerges };

  [[noreturn]] void bad_vocabulary(const std::string& got) const {
    throw Error(ErrorClass::kCorruption, {file_ + ": key \"model.vocab[\"" + shorten(key_) + "\"]\"", "got " + got,
                                          "an integer from 0 to " + std::to_string(kMaxTokenId), "get the file again"});
  }
  [[noreturn]] void bad_merge(const std::string& got) const {
    throw Error(ErrorClass::kCorruption,
                {file_ + ": key \"model.merges[" + std::to_string(merges.size()) + "]\"", "got " + got,
                 "two pieces, as \"a b\" or [\"a\", \"b\"]", "get the file again"});
  }

  bool in_model() const { return stack_.size() == 2 && model_ == stack_.back(); }

  bool value(json v) {
    if (mode_ == Mode::kVocabulary) bad_vocabulary(v.dump(-1, ' ', false, json::error_handler_t::replace));
    if (mode_ == Mode::kMerges) bad_merge(v.dump(-1, ' ', false, json::error_handler_t::replace));
    return value_in_tree(std::move(v));
  }

  bool value_in_tree(json v) {
    place(std::move(v));
    return true;
  }

  json* place(json v) {
    if (stack_.empty()) {
      root = std::move(v);
      return &root;
    }
    json& parent = *stack_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(v));
      return &parent.back();
    }
    json& member = parent[key_];
    member = std::move(v);
    return &member;
  }

  bool open(json container) {
    const bool is_model = stack_.size() == 1 && key_ == "model";
    if (stack_.size() >= kMaxJsonDepth) fail_json_depth(file_);
    json* placed = place(std::move(container));
    stack_.push_back(placed);
    if (is_model) model_ = placed;
    return true;
  }

  bool close() {
    if (mode_ != Mode::kTree) {
      mode_ = Mode::kTree;
      return true;
    }
    stack_.pop_back();
    return true;
  }

  std::string file_;
  Mode mode_ = Mode::kTree;
  std::vector<json*> stack_;  // open containers; a container's address is stable while it is open
  json* model_ = nullptr;
  std::string key_;
  bool in_pair_ = false;
  size_t pair_size_ = 0;
  std::pair<std::string, std::string> pair_;
};

void read_merges(Reader& reader, PipelineSpec& spec) {
  spec.merges.reserve(reader.merges.size());
  std::string joined;
  for (size_t i = 0; i < reader.merges.size(); ++i) {
    const auto& [left, right] = reader.merges[i];
    const Merge merge{spec.vocabulary.find(left), spec.vocabulary.find(right),
                      spec.vocabulary.find(joined.assign(left).append(right)), static_cast<uint32_t>(i)};
    for (const auto& [id, piece] :
         {std::pair(merge.left, left), std::pair(merge.right, right), std::pair(merge.result, joined)})
      if (id == kNoToken)
        throw Error(ErrorClass::kCorruption, {spec.file + ": key \"model.merges[" + std::to_string(i) + "]\"",
                                              "the piece \"" + shorten(piece) + "\" is not in the vocabulary",
                                              "a piece of model.vocab", "get the file again"});
    spec.merges.push_back(merge);
  }
}

void read_model(const JsonView& model, Reader& reader, PipelineSpec& spec) {
  // Very old files have no type; what has merges is BPE.
  const std::string type = model.string_or("type", model.has("merges") ? "BPE" : "");
  if (type != "BPE") model.unsupported("a model of type \"" + shorten(type) + "\"", "BPE");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (!model.string_or(key, "").empty()) model.at(key).unsupported("the option " + std::string(key), "null");
  if (model.has("dropout") && model.at("dropout").value() != 0.0)
    model.at("dropout").unsupported("random dropout", "null");
  const JsonView vocab = model.at("vocab"), merges = model.at("merges");
  if (!reader.has_vocabulary) vocab.fail("an object of pieces and ids");
  if (!reader.has_merges) merges.fail("an array of merges");

  spec.vocabulary.reserve(reader.vocabulary.size());
  for (const auto& [piece, id] : reader.vocabulary) spec.vocabulary.add(piece, id);
  read_merges(reader, spec);
  spec.options.byte_fallback = model.boolean_or("byte_fallback", false);
  spec.options.fuse_unk = model.boolean_or("fuse_unk", false);
  spec.options.ignore_merges = model.boolean_or("ignore_merges", false);
  if (model.has("unk_token")) spec.options.unk = spec.vocabulary.find(model.at("unk_token").string());
}

json member(const json& root, const char* key) {
  const auto found = root.find(key);
  return found == root.end() ? json(nullptr) : *found;
}

}  // namespace

AddedToken read_added_token(const JsonView& view) {
  AddedToken token;
  token.content = view.at("content").string();
  token.single_word = view.boolean_or("single_word", false);
  token.lstrip = view.boolean_or("lstrip", false);
  token.rstrip = view.boolean_or("rstrip", false);
  token.special = view.boolean_or("special", false);
  token.normalized = view.boolean_or("normalized", !token.special);
  return token;
}

PipelineSpec parse_tokenizer_json(std::string_view text, const std::string& file) {
  Reader reader(file);
  if (text.substr(0, 3) == "\xEF\xBB\xBF") text.remove_prefix(3);
  if (!json::sax_parse(text.begin(), text.end(), &reader)) {
    (void)parse_json(text, file, {.max_bytes = text.size(), .repeated_keys = true});  // throws with line and column
    throw Error(ErrorClass::kCorruption, {file, "not valid JSON", "a complete JSON document", "get the file again"});
  }
  const JsonView root(reader.root, file);
  PipelineSpec spec;
  spec.file = file;
  read_model(root.at("model"), reader, spec);
  spec.normalizer = member(reader.root, "normalizer");
  spec.pre_tokenizer = member(reader.root, "pre_tokenizer");
  spec.post_processor = member(reader.root, "post_processor");
  spec.decoder = member(reader.root, "decoder");
  if (root.has("added_tokens"))
    for (const JsonView& view : root.at("added_tokens").elements()) {
      if (view.has("id")) (void)view.at("id").integer(0, kMaxTokenId);
      spec.add_token(read_added_token(view));
    }
  return spec;
}

PipelineSpec read_tokenizer_json(const std::filesystem::path& path) {
  return parse_tokenizer_json(read_file(path), path.string());
}

}  // namespace emend::models::detail
