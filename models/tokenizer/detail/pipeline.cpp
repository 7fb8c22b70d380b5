#include <emend/core/sha256.h>
#include <emend/core/text.h>
#include <emend/models/tokenizer/detail/pipeline.h>
#include <emend/models/tokenizer/detail/unicode.h>

#include <algorithm>

namespace emend::models::detail {
namespace {

std::string fingerprint_of(const PipelineSpec& spec) {
  Sha256 hash;
  const auto number = [&hash](uint64_t value) { hash.update(&value, sizeof value); };
  const auto text = [&](std::string_view value) {
    number(value.size());
    hash.update(value);
  };
  text("emend tokenizer 1");
  for (const auto* part : {&spec.normalizer, &spec.pre_tokenizer, &spec.post_processor}) text(part->dump());
  number(static_cast<uint64_t>(spec.compose));
  const BpeOptions& options = spec.options;
  number(options.byte_level | options.byte_fallback << 1 | options.fuse_unk << 2 | options.ignore_merges << 3);
  number(options.unk);
  for (uint32_t id = 0; id < spec.vocabulary.id_end(); ++id) text(spec.vocabulary.piece(id).value_or(""));
  for (const Merge& merge : spec.merges) hash.update(&merge, sizeof merge);
  for (const AddedToken& token : spec.added) {
    text(token.content);
    number(token.id);
    number(token.single_word | token.lstrip << 1 | token.rstrip << 2 | token.normalized << 3 | token.special << 4);
  }
  for (const auto* ids : {&spec.special.prefix_ids, &spec.special.suffix_ids}) {
    number(ids->size());
    for (const int64_t id : *ids) number(static_cast<uint64_t>(id));
  }
  return hash.hex();
}

class Pipeline final : public Tokenizer {
 public:
  Pipeline(PipelineSpec spec, PreTokenizerChain pre_tokenizers)
      : spec_(std::move(spec)),
        normalizers_(make_normalizers({spec_.normalizer, spec_.file, "normalizer"}, spec_.compose)),
        pre_tokenizers_(std::move(pre_tokenizers)),
        decoder_({spec_.decoder, spec_.file, "decoder"}),
        bpe_(spec_.vocabulary, spec_.merges, spec_.options) {
    fingerprint_ = fingerprint_of(spec_);
    files_ = spec_.files;
    special_ = spec_.special;
    if (!files_.empty()) spec_.merges = {};  // only save() needs them again
    id_end_ = spec_.vocabulary.id_end();
    for (const AddedToken& token : spec_.added) {
      id_end_ = std::max(id_end_, token.id + 1);
      const bool normalised = token.normalized && !normalizers_.empty();
      std::string pattern = normalised ? normalise(normalizers_, token.content) : token.content;
      (token.normalized ? normalised_search_ : raw_search_).add(pattern, token);
      by_id_[token.id] = {std::move(pattern), token.special || by_id_[token.id].special};
    }
  }

  Encoding encode(std::string_view text, bool add_special) const override {
    Encoding encoding;
    run(text, add_special, encoding.ids, &encoding.offsets);
    return encoding;
  }

  std::vector<int64_t> encode_ids(std::string_view text, bool add_special) const override {
    std::vector<int64_t> ids;
    run(text, add_special, ids, nullptr);
    return ids;
  }

  std::string decode(std::span<const int64_t> ids, bool skip_special) const override {
    std::vector<std::string> pieces;
    pieces.reserve(ids.size());
    for (const int64_t id : ids) {
      check_id(id);
      if (skip_special && is_special(id)) continue;
      if (auto piece = piece_of(id)) pieces.emplace_back(*piece);
    }
    return decoder_.decode(std::move(pieces));
  }

  std::string token_text(int64_t id) const override { return std::string(piece_of(id).value_or("")); }

  std::string token_bytes(int64_t id, bool at_start) const override {
    const auto piece = piece_of(id);
    return piece ? decoder_.decode_one(std::string(*piece), at_start) : std::string();
  }

  std::optional<int64_t> token_id(std::string_view piece) const override {
    const uint32_t id = spec_.find(piece);
    return id == kNoToken ? std::nullopt : std::optional<int64_t>(id);
  }

  bool is_special(int64_t id) const override {
    const auto found = id < 0 || id > kMaxTokenId ? by_id_.end() : by_id_.find(static_cast<uint32_t>(id));
    return found != by_id_.end() && found->second.special;
  }

  int64_t vocab_size() const override { return id_end_; }

  void save(const std::filesystem::path& folder) const override {
    if (!files_.empty() || !kept_.empty()) return Tokenizer::save(folder);
    write_tokenizer_json(spec_, folder);
  }

 private:
  struct AddedPiece {
    std::string piece;
    bool special = false;
  };
  using Offsets = std::vector<std::pair<size_t, size_t>>;

  // The state of one encode call.
  struct Output {
    std::vector<int64_t>& ids;
    Offsets* offsets;
    std::vector<WordToken> word;  // scratch

    void add(int64_t id, size_t begin, size_t end) {
      ids.push_back(id);
      if (offsets) offsets->emplace_back(begin, end);
    }
  };

  std::optional<std::string_view> piece_of(int64_t id) const {
    if (id < 0 || id > kMaxTokenId) return std::nullopt;
    const auto added = by_id_.find(static_cast<uint32_t>(id));
    if (added != by_id_.end()) return added->second.piece;
    return spec_.vocabulary.piece(static_cast<uint32_t>(id));
  }

  void run(std::string_view text, bool add_special, std::vector<int64_t>& ids, Offsets* offsets) const {
    check_text(text);
    Output out{ids, offsets, {}};
    ids.reserve(text.size() / 4 + 8);
    if (offsets) offsets->reserve(text.size() / 4 + 8);
    if (add_special)
      for (const int64_t id : special_.prefix_ids) out.add(id, 0, 0);
    split_added(raw_search_, {text}, out, [&](const Piece& part) {
      normalise(normalizers_, part, [&](const Piece& piece) {
        split_added(normalised_search_, piece, out, [&](const Piece& plain) { words(plain, out); });
      });
    });
    if (add_special)
      for (const int64_t id : special_.suffix_ids) out.add(id, text.size(), text.size());
  }

  // Writes the added tokens in `piece` and hands what is between them to `plain`.
  template <class Plain>
  void split_added(const AddedTokenSearch& search, const Piece& piece, Output& out, Plain plain) const {
    if (piece.text.empty()) return;
    if (search.empty()) return plain(piece);
    std::vector<AddedSpan> spans;
    search.split(piece.text, spans);
    for (const AddedSpan& span : spans) {
      if (span.token) {
        out.add(span.token->id, piece.original_begin(span.begin), piece.original_end(span.end));
      } else {
        plain(piece.part(span.begin, span.end));
      }
    }
  }

  void words(const Piece& piece, Output& out) const {
    pre_tokenise(pre_tokenizers_, piece, [&](const Piece& part) {
      if (bpe_.splits_at_metaspace()) {
        cut_at_metaspace(part, out);
      } else {
        tokens(part, out);
      }
    });
  }

  void cut_at_metaspace(const Piece& piece, Output& out) const {
    const std::string_view text = piece.text;
    size_t begin = 0, last_end = kNone;  // end of the ▁ seen last
    for (size_t at = 0; (at = text.find(kMetaspace, at)) != std::string_view::npos;
         last_end = at += kMetaspace.size()) {
      if (at == 0 || at == last_end) continue;  // between two ▁ is no cut
      tokens(piece.part(begin, at), out);
      begin = at;
    }
    tokens(piece.part(begin, text.size()), out);
  }

  void tokens(const Piece& word, Output& out) const {
    out.word.clear();
    bpe_.tokenise(word.text, out.word);
    for (const WordToken& token : out.word)
      out.add(token.id, out.offsets ? word.original_begin(token.begin) : 0,
              out.offsets ? word.original_end(token.end) : 0);
  }

  PipelineSpec spec_;
  NormalizerChain normalizers_;
  PreTokenizerChain pre_tokenizers_;
  DecoderChain decoder_;
  Bpe bpe_;
  AddedTokenSearch raw_search_, normalised_search_;
  std::unordered_map<uint32_t, AddedPiece> by_id_;
  uint32_t id_end_ = 0;
};

}  // namespace

bool PipelineSpec::add_merge(std::string_view left, std::string_view right) {
  const Merge merge{vocabulary.find(left), vocabulary.find(right), vocabulary.find(std::string(left).append(right)),
                    static_cast<uint32_t>(merges.size())};
  if (merge.left == kNoToken || merge.right == kNoToken || merge.result == kNoToken) return false;
  merges.push_back(merge);
  return true;
}

uint32_t PipelineSpec::find(std::string_view piece) const {
  const auto known = added_index_.find(std::string(piece));
  return known != added_index_.end() ? added[known->second].id : vocabulary.find(piece);
}

void PipelineSpec::add_token(AddedToken token) {
  if (token.content.empty()) return;
  const uint32_t known = find(token.content);
  token.id = known != kNoToken ? known : std::max(next_id_, static_cast<uint32_t>(vocabulary.size()));
  insert(std::move(token));
}

void PipelineSpec::add_token_with_id(AddedToken token, const std::string& where) {
  if (token.content.empty()) return;
  const uint32_t known = find(token.content);
  const auto taken = vocabulary.piece(token.id);
  if (known == kNoToken && taken)
    throw Error(ErrorClass::kCorruption, {where,
                                          "the token \"" + shorten(token.content) + "\" has the id " +
                                              std::to_string(token.id) + " of the piece \"" + shorten(*taken) + "\"",
                                          "an id of its own", "get the tokenizer files again"});
  if (known != kNoToken) token.id = known;
  insert(std::move(token));
}

void PipelineSpec::insert(AddedToken token) {
  next_id_ = std::max(next_id_, token.id + 1);
  const auto [place, is_new] = added_index_.try_emplace(token.content, added.size());
  if (is_new) {
    added.push_back(std::move(token));
  } else {
    token.special = token.special || added[place->second].special;
    added[place->second] = std::move(token);
  }
}

std::unique_ptr<Tokenizer> make_pipeline(PipelineSpec spec) {
  PreTokenizerChain chain = make_pre_tokenizers({spec.pre_tokenizer, spec.file, "pre_tokenizer"});
  spec.options.byte_level = chain.byte_level;
  read_post_processor({spec.post_processor, spec.file, "post_processor"}, spec.special);
  return std::make_unique<Pipeline>(std::move(spec), std::move(chain));
}

void AddedTokenSearch::add(std::string_view pattern, const AddedToken& token) {
  if (pattern.empty()) return;
  tokens_.insert_or_assign(std::string(pattern), token);
  begins_[static_cast<unsigned char>(pattern[0])] = true;
}

// The longest pattern that `text` begins with, or the end. Patterns up to `text` in order that it does not begin with
// share less with it than those that it does.
AddedTokenSearch::Tokens::const_iterator AddedTokenSearch::longest(std::string_view text) const {
  for (auto after = tokens_.upper_bound(text); after != tokens_.begin(); after = tokens_.upper_bound(text)) {
    const auto found = std::prev(after);
    if (text.starts_with(found->first)) return found;
    text = text.substr(0, std::ranges::mismatch(text, found->first).in1 - text.begin());
  }
  return tokens_.end();
}

void AddedTokenSearch::split(std::string_view text, std::vector<AddedSpan>& spans) const {
  size_t done = 0;
  for (size_t at = 0; at < text.size() && !tokens_.empty();) {
    const bool may_begin = begins_[static_cast<unsigned char>(text[at])];
    const auto found = may_begin ? longest(text.substr(at)) : tokens_.end();
    if (found == tokens_.end()) {
      ++at;
      continue;
    }
    const AddedToken* token = &found->second;
    size_t begin = at, end = at + found->first.size();
    at = end;
    const auto is_word_at = [&](size_t place) { return is_word(decode_utf8(text.data() + place)); };
    if (token->single_word &&
        ((begin > 0 && is_word_at(last_character(text.substr(0, begin)))) || (end < text.size() && is_word_at(end))))
      continue;
    if (token->lstrip) begin = std::max(white_space_before(text, begin), done);
    if (token->rstrip) end = white_space_after(text, end);
    if (begin >= end) continue;  // taken by the one before
    if (done < begin) spans.push_back({done, begin, nullptr});
    spans.push_back({begin, end, token});
    done = end;
  }
  if (done != text.size()) spans.push_back({done, text.size(), nullptr});
}

}  // namespace emend::models::detail
