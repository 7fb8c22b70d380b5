// The Unicode normalisation forms with origins.
#pragma once

#include <emend/models/tokenizer/detail/normalizer.h>

#include <memory>

namespace emend::models::detail {

/// NFC (compose), NFD, NFKC (compose, compatibility) or NFKD. Characters that combine are normalised together, and
/// all bytes of the result stand for all bytes of that group; everything else keeps its own place.
[[nodiscard]] std::unique_ptr<Normalizer> make_unicode_form(bool compose, bool compatibility, ComposeTables tables);

}  // namespace emend::models::detail
