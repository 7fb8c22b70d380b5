#pragma once

namespace emend::testing {

/// The address sanitizer is in this build: its malloc keeps what is freed. gcc says so by a macro, clang by a feature.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kAddressSanitizer = true;
#elif defined(__has_feature)
inline constexpr bool kAddressSanitizer = __has_feature(address_sanitizer);
#else
inline constexpr bool kAddressSanitizer = false;
#endif

}  // namespace emend::testing
