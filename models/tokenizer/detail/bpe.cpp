#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/models/tokenizer/detail/bpe.h>
#include <emend/models/tokenizer/detail/unicode.h>

#include <algorithm>
#include <bit>
#include <queue>
#include <tuple>

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

Bpe::Bpe(const Vocabulary& vocabulary, const std::vector<Merge>& merges, BpeOptions options)
    : vocabulary_(vocabulary), merges_(merges), options_(options) {
  single_ids_.fill(kNoToken);
  byte_ids_.fill(kNoToken);
  for (int byte = 0; byte < 256; ++byte) {
    if (options_.byte_level) {
      single_ids_[byte] = vocabulary_.find(byte_level_characters()[byte]);
      continue;
    }
    if (byte < 128) single_ids_[byte] = vocabulary_.find(std::string(1, static_cast<char>(byte)));
    if (options_.byte_fallback) byte_ids_[byte] = vocabulary_.find(formatted("<0x%02X>", byte));
  }
  splits_at_metaspace_ = !options_.byte_level && !options_.ignore_merges && vocabulary_.find(kMetaspace) != kNoToken &&
                         std::ranges::none_of(merges, [&](const Merge& merge) {
                           return vocabulary_.piece(merge.right).value_or("").starts_with(kMetaspace) &&
                                  !vocabulary_.piece(merge.left).value_or("").ends_with(kMetaspace);
                         });
}

void Bpe::tokenise(std::string_view word, std::vector<WordToken>& out) const {
  if (word.empty() || cache_.find(word, out)) return;
  const size_t before = out.size();
  tokenise_uncached(word, out);
  cache_.store(word, std::span(out).subspan(before));
}

void Bpe::tokenise_uncached(std::string_view word, std::vector<WordToken>& out) const {
  if (options_.ignore_merges) {
    const uint32_t id = vocabulary_.find(options_.byte_level ? to_byte_level(word) : word);
    if (id != kNoToken) return out.push_back({id, 0, static_cast<uint32_t>(word.size())});
  }
  std::vector<Symbol> symbols;
  symbols.reserve(word.size());
  initial_symbols(word, symbols);
  for (size_t i = 0; i + 1 < symbols.size(); ++i) symbols[i].merge = merges_.find(symbols[i].id, symbols[i + 1].id);
  if (symbols.size() <= kShortWord) {
    merge_short(symbols);
  } else {
    merge_long(symbols);
  }
  for (const Symbol& symbol : symbols) out.push_back({symbol.id, symbol.begin, symbol.end});
}

void Bpe::initial_symbols(std::string_view word, std::vector<Symbol>& symbols) const {
  const auto byte = [&](uint32_t at) { return static_cast<unsigned char>(word[at]); };
  const auto has_byte_piece = [&](char c) { return byte_ids_[static_cast<unsigned char>(c)] != kNoToken; };
  bool fusing = false;  // the last one was unknown
  for (uint32_t at = 0, end = 0; at < word.size(); at = end) {
    end = at + (options_.byte_level ? 1 : static_cast<uint32_t>(utf8_length(word[at])));
    const auto character = word.substr(at, end - at);
    const uint32_t id = character.size() == 1 ? single_ids_[byte(at)] : vocabulary_.find(character);
    const bool bytes = id == kNoToken && std::ranges::all_of(character, has_byte_piece);
    if (id != kNoToken) {
      symbols.push_back({id, at, end, nullptr});
    } else if (bytes) {
      for (uint32_t i = at; i < end; ++i) symbols.push_back({byte_ids_[byte(i)], i, i + 1, nullptr});
    } else if (fusing && options_.fuse_unk) {
      symbols.back().end = end;
    } else if (options_.unk != kNoToken) {
      symbols.push_back({options_.unk, at, end, nullptr});
    }
    fusing = id == kNoToken && !bytes && options_.unk != kNoToken;
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

void Vocabulary::reserve(size_t pieces) {
  ids_.reserve(pieces);
  pieces_.reserve(pieces);
}

void Vocabulary::add(std::string_view piece, uint32_t id) {
  EMEND_CHECK(id <= kMaxTokenId, "token id too large");
  if (id >= pieces_.size()) pieces_.resize(id + 1);
  if (!pieces_[id]) pieces_[id] = &ids_.emplace(piece, id).first->first;
}

uint32_t Vocabulary::find(std::string_view piece) const {
  const auto found = ids_.find(piece);
  return found == ids_.end() ? kNoToken : found->second;
}

std::optional<std::string_view> Vocabulary::piece(uint32_t id) const {
  if (id >= pieces_.size() || !pieces_[id]) return std::nullopt;
  return *pieces_[id];
}

}  // namespace emend::models::detail
