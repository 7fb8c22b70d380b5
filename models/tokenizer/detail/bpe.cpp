#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/models/tokenizer/detail/bpe.h>
#include <emend/models/tokenizer/detail/unicode.h>

#include <algorithm>
#include <bit>
#include <queue>
#include <tuple>
#include <utility>

namespace emend::models::detail {
namespace {

// Up to this many symbols, looking at all of them for each merge beats a heap.
constexpr size_t kShortWord = 48;

uint64_t hash_pair(uint32_t left, uint32_t right) {
  uint64_t hash = (static_cast<uint64_t>(left) << 32 | right) * 0x9E3779B97F4A7C15ULL;
  return hash ^ hash >> 31;
}

bool by_rank(const Merge& a, const Merge& b) {
  return std::tie(a.rank, a.left, a.right) < std::tie(b.rank, b.left, b.right);
}

}  // namespace

MergeTable::MergeTable(const std::vector<Merge>& merges)
    : slots_(std::bit_ceil(merges.size() * 2 + 2), Merge{0, 0, kNoToken, 0}) {
  const size_t mask = slots_.size() - 1;
  for (const Merge& merge : merges) {
    size_t slot = hash_pair(merge.left, merge.right) & mask;
    while (slots_[slot].result != kNoToken && (slots_[slot].left != merge.left || slots_[slot].right != merge.right))
      slot = (slot + 1) & mask;
    slots_[slot] = merge;  // of several merges of one pair the last counts, as in the reference
  }
}

const Merge* MergeTable::find(uint32_t left, uint32_t right) const {
  const size_t mask = slots_.size() - 1;
  for (size_t slot = hash_pair(left, right) & mask; slots_[slot].result != kNoToken; slot = (slot + 1) & mask)
    if (slots_[slot].left == left && slots_[slot].right == right) return &slots_[slot];
  return nullptr;
}

std::vector<Merge> MergeTable::sorted() const {
  std::vector<Merge> merges;
  for (const Merge& merge : slots_)
    if (merge.result != kNoToken) merges.push_back(merge);
  std::ranges::sort(merges, by_rank);
  return merges;
}

Bpe::Bpe(Vocabulary vocabulary, const std::vector<Merge>& merges, BpeOptions options)
    : vocabulary_(std::move(vocabulary)), merges_(merges), options_(options) {
  for (int byte = 0; byte < 256; ++byte)
    byte_ids_[byte] =
        vocabulary_.find(options_.byte_level ? byte_level_characters()[byte] : formatted("<0x%02X>", byte));
  for (int byte = 0; byte < 128; ++byte) {
    const char character = static_cast<char>(byte);
    ascii_ids_[byte] = vocabulary_.find({&character, 1});
  }
  has_byte_pieces_ = options_.byte_fallback && std::ranges::count(byte_ids_, kNoToken) < 256;
  splits_at_metaspace_ = check_metaspace();
}

bool Bpe::check_metaspace() const {
  if (options_.byte_level || options_.ignore_merges || vocabulary_.find(kMetaspace) == kNoToken) return false;
  for (const Merge& merge : merges_.sorted()) {
    const auto left = vocabulary_.piece(merge.left).value_or(""), right = vocabulary_.piece(merge.right).value_or("");
    if (right.substr(0, 3) == kMetaspace && (left.size() < 3 || left.substr(left.size() - 3) != kMetaspace))
      return false;
  }
  return true;
}

void Bpe::tokenise(std::string_view word, std::vector<WordToken>& out) const {
  if (word.empty()) return;
  if (word.size() > WordCache::kMaxKey) return tokenise_uncached(word, out);
  const uint64_t hash = hash_bytes(word);
  if (cache_.find(word, hash, out)) return;
  const size_t before = out.size();
  tokenise_uncached(word, out);
  cache_.store(word, hash, out.data() + before, out.size() - before);
}

void Bpe::tokenise_uncached(std::string_view word, std::vector<WordToken>& out) const {
  if (options_.ignore_merges) {
    const uint32_t id = vocabulary_.find(options_.byte_level ? to_byte_level(word) : word);
    if (id != kNoToken) return out.push_back({id, 0, static_cast<uint32_t>(word.size())});
  }
  std::vector<Symbol> symbols;
  symbols.reserve(word.size());
  if (options_.byte_level) {
    initial_bytes(word, symbols);
  } else {
    initial_characters(word, symbols);
  }
  for (size_t i = 0; i + 1 < symbols.size(); ++i) symbols[i].merge = merges_.find(symbols[i].id, symbols[i + 1].id);
  if (symbols.size() <= kShortWord) {
    merge_short(symbols);
  } else {
    merge_long(symbols);
  }
  for (const Symbol& symbol : symbols) out.push_back({symbol.id, symbol.begin, symbol.end});
}

void Bpe::add_unknown(uint32_t begin, uint32_t end, bool& fusing, std::vector<Symbol>& symbols) const {
  if (options_.unk == kNoToken) return;
  if (fusing && options_.fuse_unk) {
    symbols.back().end = end;
  } else {
    symbols.push_back({options_.unk, begin, end, nullptr});
  }
  fusing = true;
}

void Bpe::initial_bytes(std::string_view word, std::vector<Symbol>& symbols) const {
  bool fusing = false;
  for (uint32_t at = 0; at < word.size(); ++at) {
    const uint32_t id = byte_ids_[static_cast<unsigned char>(word[at])];
    if (id == kNoToken) {
      add_unknown(at, at + 1, fusing, symbols);
    } else {
      symbols.push_back({id, at, at + 1, nullptr});
      fusing = false;
    }
  }
}

void Bpe::initial_characters(std::string_view word, std::vector<Symbol>& symbols) const {
  bool fusing = false;
  for (uint32_t at = 0; at < word.size();) {
    const auto length = static_cast<uint32_t>(utf8_length(word[at]));
    const uint32_t end = at + length;
    const uint32_t id =
        length == 1 ? ascii_ids_[static_cast<unsigned char>(word[at])] : vocabulary_.find(word.substr(at, length));
    const auto byte_id = [&](uint32_t i) { return byte_ids_[static_cast<unsigned char>(word[i])]; };
    if (id != kNoToken) {
      symbols.push_back({id, at, end, nullptr});
      fusing = false;
    } else {
      bool all_bytes = has_byte_pieces_;
      for (uint32_t i = at; i < end; ++i) all_bytes = all_bytes && byte_id(i) != kNoToken;
      if (all_bytes) {
        for (uint32_t i = at; i < end; ++i) symbols.push_back({byte_id(i), i, i + 1, nullptr});
        fusing = false;
      } else {
        add_unknown(at, end, fusing, symbols);
      }
    }
    at = end;
  }
}

void Bpe::merge_short(std::vector<Symbol>& symbols) const {
  for (;;) {
    size_t best = symbols.size();
    for (size_t i = 0; i + 1 < symbols.size(); ++i)
      if (symbols[i].merge && (best == symbols.size() || symbols[i].merge->rank < symbols[best].merge->rank)) best = i;
    if (best == symbols.size()) return;
    symbols[best].id = symbols[best].merge->result;
    symbols[best].end = symbols[best + 1].end;
    symbols.erase(symbols.begin() + static_cast<ptrdiff_t>(best) + 1);
    const auto renew = [&](size_t i) {
      symbols[i].merge = i + 1 < symbols.size() ? merges_.find(symbols[i].id, symbols[i + 1].id) : nullptr;
    };
    renew(best);
    if (best > 0) renew(best - 1);
  }
}

void Bpe::merge_long(std::vector<Symbol>& symbols) const {
  struct Candidate {
    uint32_t rank, position;
    const Merge* merge;
    bool operator<(const Candidate& other) const {  // the queue hands out the largest: lowest rank, then leftmost
      return rank != other.rank ? rank > other.rank : position > other.position;
    }
  };
  const auto size = static_cast<uint32_t>(symbols.size());
  std::vector<uint32_t> previous(size), next(size);
  std::vector<Candidate> initial;
  for (uint32_t i = 0; i < size; ++i) {
    previous[i] = i - 1;  // wraps to kNoToken for the first
    next[i] = i + 1;
    if (symbols[i].merge) initial.push_back({symbols[i].merge->rank, i, symbols[i].merge});
  }
  std::priority_queue<Candidate> queue(std::less<Candidate>(), std::move(initial));
  const auto renew = [&](uint32_t i) {
    const Merge* merge = next[i] < size ? merges_.find(symbols[i].id, symbols[next[i]].id) : nullptr;
    symbols[i].merge = merge;
    if (merge) queue.push({merge->rank, i, merge});
  };
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    const uint32_t at = top.position;
    if (symbols[at].id == kNoToken || symbols[at].merge != top.merge) continue;  // overtaken by another merge
    const uint32_t gone = next[at];
    symbols[at].id = top.merge->result;
    symbols[at].end = symbols[gone].end;
    symbols[gone].id = kNoToken;
    next[at] = next[gone];
    if (next[at] < size) previous[next[at]] = at;
    renew(at);
    if (previous[at] != kNoToken) renew(previous[at]);
  }
  std::erase_if(symbols, [](const Symbol& symbol) { return symbol.id == kNoToken; });
}

std::vector<Merge> merges_from_ranks(const Vocabulary& vocabulary, const std::vector<uint32_t>& ranks) {
  std::vector<Merge> merges;
  for (uint32_t id = 0; id < vocabulary.id_end() && id < ranks.size(); ++id) {
    const auto piece = vocabulary.piece(id);
    if (!piece || piece->empty() || ranks[id] == kNoToken || vocabulary.find(*piece) != id) continue;
    for (size_t cut = utf8_length(piece->front()); cut < piece->size(); cut += utf8_length((*piece)[cut])) {
      const uint32_t left = vocabulary.find(piece->substr(0, cut)), right = vocabulary.find(piece->substr(cut));
      if (left == kNoToken || right == kNoToken || left >= ranks.size() || right >= ranks.size()) continue;
      if (ranks[left] == kNoToken || ranks[right] == kNoToken) continue;
      merges.push_back({left, right, id, ranks[id]});
    }
  }
  std::ranges::stable_sort(merges, by_rank);
  return merges;
}

uint64_t hash_bytes(std::string_view bytes) {
  constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15ULL;
  uint64_t hash = bytes.size() * kMultiplier;
  const auto mix = [&hash](uint64_t word) {
    hash = (hash ^ word) * kMultiplier;
    hash ^= hash >> 32;
  };
  const char* at = bytes.data();
  size_t left = bytes.size();
  for (; left >= 8; left -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    mix(word);
  }
  uint64_t word = 0;
  if (left > 0) std::memcpy(&word, at, left);
  mix(word);
  return hash ^ hash >> 29;
}

void Vocabulary::reserve(size_t pieces) {
  places_.reserve(pieces);
  text_.reserve(pieces * 8);
  grow(std::bit_ceil(pieces * 2 + 16));
}

void Vocabulary::add(std::string_view piece, uint32_t id) {
  EMEND_CHECK(id <= kMaxTokenId && text_.size() + piece.size() < kNoToken, "token id or vocabulary too large");
  if (id >= places_.size()) places_.resize(id + 1);
  if (places_[id].length != kNoToken) return;
  places_[id] = {static_cast<uint32_t>(text_.size()), static_cast<uint32_t>(piece.size())};
  text_ += piece;
  if (find(piece) != kNoToken) return;
  if ((count_ + 1) * 2 > slots_.size()) grow(std::bit_ceil((count_ + 8) * 4));
  insert(id);
  ++count_;
}

void Vocabulary::insert(uint32_t id) {
  const size_t mask = slots_.size() - 1;
  size_t slot = hash_bytes(text(id)) & mask;
  while (slots_[slot] != kNoToken) slot = (slot + 1) & mask;
  slots_[slot] = id;
}

void Vocabulary::grow(size_t slots) {
  if (slots <= slots_.size()) return;
  const std::vector<uint32_t> old = std::exchange(slots_, std::vector<uint32_t>(slots, kNoToken));
  for (const uint32_t id : old)
    if (id != kNoToken) insert(id);
}

uint32_t Vocabulary::find(std::string_view piece) const {
  if (slots_.empty()) return kNoToken;
  const size_t mask = slots_.size() - 1;
  for (size_t slot = hash_bytes(piece) & mask; slots_[slot] != kNoToken; slot = (slot + 1) & mask)
    if (text(slots_[slot]) == piece) return slots_[slot];
  return kNoToken;
}

std::optional<std::string_view> Vocabulary::piece(uint32_t id) const {
  if (id >= places_.size() || places_[id].length == kNoToken) return std::nullopt;
  return text(id);
}

}  // namespace emend::models::detail
