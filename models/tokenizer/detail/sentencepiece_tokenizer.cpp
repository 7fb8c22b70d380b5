// Tokenizers that are a SentencePiece model: ChatGLM3, InternLM, Baichuan, Llama 2 without a tokenizer.json.
#include <emend/core/atomic_file.h>
#include <emend/core/sha256.h>
#include <emend/core/text.h>
#include <emend/models/tokenizer/detail/bpe.h>
#include <emend/models/tokenizer/detail/sources.h>
#include <emend/models/tokenizer/detail/steps.h>
#include <emend/models/tokenizer/detail/unicode.h>
#include <sentencepiece_processor.h>

#include <algorithm>
#include <map>

namespace emend::models::detail {
namespace {

class SentencePieceTokenizer final : public Tokenizer {
 public:
  SentencePieceTokenizer(const std::filesystem::path& path, const FolderConfig& config)
      : is_chatglm_(config.tokenizer_class().rfind("ChatGLM", 0) == 0) {
    const std::string model = read_sentencepiece(path, processor_);
    files_ = config.files({path.filename().string()});
    pieces_ = processor_.GetPieceSize();
    adds_dummy_prefix_ = adds_space(processor_);
    cuts_at_spaces_ = adds_dummy_prefix_ && !has_pieces_across_words();
    if (is_chatglm_) {
      add_chatglm_tokens(config);
    } else {
      add_tokens(config);
    }
    set_special(config);
    Sha256 hash;
    hash.update(model);
    for (const auto& [id, token] : added_) hash.update(std::to_string(id) + "=" + token.content + "\n");
    for (const int64_t id : special_.prefix_ids) hash.update("prefix " + std::to_string(id) + "\n");
    fingerprint_ = hash.hex();
  }

  Encoding encode(std::string_view text, bool add_special) const override {
    check_text(text);
    Encoding encoding;
    const auto add = [&](int64_t id, size_t begin, size_t end) {
      encoding.ids.push_back(id);
      encoding.offsets.emplace_back(begin, end);
    };
    if (add_special)
      for (const int64_t id : special_.prefix_ids) add(id, 0, 0);
    std::vector<AddedSpan> spans;
    search_.split(text, spans);
    for (const AddedSpan& span : spans) {
      if (span.token) {
        add(span.token->id, span.begin, span.end);
      } else {
        encode_plain(text.substr(span.begin, span.end - span.begin), span.begin, encoding);
      }
    }
    if (add_special)
      for (const int64_t id : special_.suffix_ids) add(id, text.size(), text.size());
    return encoding;
  }

  std::string decode(std::span<const int64_t> ids, bool skip_special) const override {
    std::string text;
    std::vector<int> run;
    const auto end_run = [&] {
      if (run.empty()) return;
      std::string part = processor_.DecodeIds(run);
      // The library drops the space before a first word; only the first word of the text has none.
      if (!text.empty() && adds_dummy_prefix_ && processor_.IdToPiece(run[0]).rfind(kMetaspace, 0) == 0)
        part.insert(0, 1, ' ');
      text += part;
      run.clear();
    };
    for (const int64_t id : ids) {
      check_id(id);
      if (const AddedToken* token = added(id)) {
        end_run();
        if (!skip_special || !token->special) text += token->content;
      } else if (id < pieces_) {
        run.push_back(static_cast<int>(id));
      }
    }
    end_run();
    return repair_utf8(text);
  }

  std::string token_text(int64_t id) const override {
    if (const AddedToken* token = added(id)) return token->content;
    return id >= 0 && id < pieces_ ? processor_.IdToPiece(static_cast<int>(id)) : std::string();
  }

  std::string token_bytes(int64_t id, bool at_start) const override {
    if (const AddedToken* token = added(id)) return token->content;
    if (id < 0 || id >= pieces_) return {};
    const int piece_id = static_cast<int>(id);
    if (processor_.IsControl(piece_id)) return {};
    if (processor_.IsUnknown(piece_id)) return " \xE2\x81\x87 ";
    std::string piece = processor_.IdToPiece(piece_id);
    if (processor_.IsByte(piece_id)) return std::string(1, static_cast<char>(byte_of_piece(piece)));
    if (at_start && adds_dummy_prefix_ && piece.rfind(kMetaspace, 0) == 0) piece.erase(0, kMetaspace.size());
    return replace_all(std::move(piece), kMetaspace, " ");
  }

  std::optional<int64_t> token_id(std::string_view piece) const override {
    for (const auto& [id, token] : added_)
      if (token.content == piece) return id;
    const int id = processor_.PieceToId(absl::string_view(piece.data(), piece.size()));
    if (id < 0 || id >= pieces_ || processor_.IdToPiece(id) != piece) return std::nullopt;  // unknown pieces map to unk
    return id;
  }

  bool is_special(int64_t id) const override {
    if (const AddedToken* token = added(id)) return token->special;
    return id >= 0 && id < pieces_ && processor_.IsControl(static_cast<int>(id));
  }

  int64_t vocab_size() const override {
    return std::max<int64_t>(pieces_, added_.empty() ? 0 : added_.rbegin()->first + 1);
  }

 private:
  const AddedToken* added(int64_t id) const {
    const auto found = added_.find(id);
    return found == added_.end() ? nullptr : &found->second;
  }

  // Control pieces ("<s>", "</s>") and the tokens of the configuration are found in the text.
  void add_tokens(const FolderConfig& config) {
    for (int id = 0; id < pieces_; ++id) {
      if (!processor_.IsControl(id) && !processor_.IsUnknown(id)) continue;
      added_[id] = {.content = processor_.IdToPiece(id), .id = static_cast<uint32_t>(id)};
    }
    for (const AddedToken& token : config.added_tokens()) added_[token.id] = token;
    for (const auto& [id, token] : added_) search_.add(token.content, token);
  }

  // ChatGLM's code appends its tokens to the vocabulary and never looks for them in plain text.
  void add_chatglm_tokens(const FolderConfig& config) {
    auto tokens = config.special_token_ids();
    if (tokens.empty()) {
      for (const char* name :
           {"[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"})
        tokens.emplace_back(name, pieces_ + std::ssize(tokens));
    }
    for (const auto& [piece, id] : tokens) added_[id] = {.content = piece, .id = static_cast<uint32_t>(id)};
  }

  void set_special(const FolderConfig& config) {
    config.fill(special_, [this](const std::string& piece) { return token_id(piece); });
    const auto or_model = [](std::optional<int64_t>& id, int own) {
      if (!id && own >= 0) id = own;
    };
    or_model(special_.bos, processor_.bos_id());
    or_model(special_.eos, processor_.eos_id());
    or_model(special_.unk, processor_.unk_id());
    or_model(special_.pad, processor_.pad_id());
    if (special_.eos_ids.empty() && special_.eos) special_.eos_ids.push_back(*special_.eos);
    if (is_chatglm_) {
      for (const char* name : {"[gMASK]", "sop"})
        if (const auto id = token_id(name)) special_.prefix_ids.push_back(*id);
      return;
    }
    const std::string& name = config.tokenizer_class();
    const bool by_default =
        name.rfind("Llama", 0) == 0 || name.rfind("InternLM", 0) == 0 || name.rfind("Gemma", 0) == 0;
    if (config.flag("add_bos_token").value_or(by_default) && special_.bos) special_.prefix_ids.push_back(*special_.bos);
    if (config.flag("add_eos_token").value_or(false) && special_.eos) special_.suffix_ids.push_back(*special_.eos);
  }

  // The library takes about 1.5 µs for a word, and more than that for each word of a long text. Where a single space
  // stands between two visible ASCII characters, the space is the prefix of the next word, so that the two sides can
  // be encoded apart, and frequent words come from the cache. Only vocabularies without a piece across words allow it.
  void encode_plain(std::string_view text, size_t base, Encoding& encoding) const {
    std::vector<WordToken> tokens;
    const auto word = [&](size_t begin, size_t end) {
      tokens.clear();
      word_tokens(text.substr(begin, end - begin), tokens);
      for (WordToken& token : tokens) {
        encoding.ids.push_back(token.id);
        encoding.offsets.emplace_back(base + begin + token.begin, base + begin + token.end);
      }
      if (begin == 0 || tokens.empty()) return;
      auto& first = encoding.offsets[encoding.offsets.size() - tokens.size()];  // stands for the space as well
      --first.first;
      first.second = std::max(first.second, first.first + 1);
    };
    const auto is_visible = [&](size_t at) { return text[at] > ' ' && text[at] < '\x7F'; };
    size_t begin = 0;
    for (size_t at = 1; cuts_at_spaces_ && at + 1 < text.size(); ++at) {
      if (text[at] != ' ' || !is_visible(at - 1) || !is_visible(at + 1)) continue;
      word(begin, at);
      begin = at + 1;
    }
    if (begin < text.size()) word(begin, text.size());
  }

  void word_tokens(std::string_view word, std::vector<WordToken>& tokens) const {
    if (cache_.find(word, tokens)) return;
    const auto result = processor_.EncodeAsImmutableProto(absl::string_view(word.data(), word.size()));
    const auto pieces = result.pieces();
    size_t bytes = 0;  // byte pieces in a row that stand for one character
    for (const auto& piece : pieces) {
      tokens.push_back({piece.id(), piece.begin(), piece.end()});
      bytes = processor_.IsByte(static_cast<int>(piece.id())) ? bytes + 1 : 0;
      if (bytes == 0 || piece.begin() == piece.end()) continue;
      // The library gives the whole character to the last byte; give each its own where they correspond.
      const bool exact = piece.end() - piece.begin() == bytes;
      for (size_t k = 0; k < bytes; ++k) {
        WordToken& token = tokens[tokens.size() - bytes + k];
        token.begin = exact ? piece.begin() + static_cast<uint32_t>(k) : piece.begin();
        token.end = exact ? token.begin + 1 : piece.end();
      }
      bytes = 0;
    }
    cache_.store(word, tokens);
  }

  bool has_pieces_across_words() const {
    for (int id = 0; id < pieces_; ++id) {
      const std::string& piece = processor_.IdToPiece(id);
      if (piece.find(' ') != std::string::npos) return true;
      size_t start = 0;
      while (piece.compare(start, kMetaspace.size(), kMetaspace) == 0) start += kMetaspace.size();
      if (piece.find(kMetaspace, start) != std::string::npos) return true;
    }
    return false;
  }

  sentencepiece::SentencePieceProcessor processor_;
  bool is_chatglm_;
  bool adds_dummy_prefix_ = false, cuts_at_spaces_ = false;
  int pieces_ = 0;
  std::map<int64_t, AddedToken> added_;
  AddedTokenSearch search_;
  WordCache cache_;
};

}  // namespace

std::string read_sentencepiece(const std::filesystem::path& path, sentencepiece::SentencePieceProcessor& processor) {
  std::string model = read_file(path);
  const auto status = processor.LoadFromSerializedProto(model);
  if (!status.ok() || processor.GetPieceSize() == 0)
    throw Error(ErrorClass::kCorruption, {path.string(), "not a SentencePiece model (" + status.ToString() + ")",
                                          "a tokenizer.model", "get the file again"});
  return model;
}

bool adds_space(const sentencepiece::SentencePieceProcessor& processor) {
  const auto pieces = processor.EncodeAsPieces("a");
  return !pieces.empty() && pieces[0].starts_with(kMetaspace);
}

std::unique_ptr<Tokenizer> load_sentencepiece(const std::filesystem::path& path, const FolderConfig& config) {
  return std::make_unique<SentencePieceTokenizer>(path, config);
}

}  // namespace emend::models::detail
