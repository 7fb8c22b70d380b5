// A scoped set of captures, edits and stops on one model.
#pragma once

#include <emend/hooks/hook_point.h>

#include <optional>

namespace emend::hooks {

struct CaptureOptions {
  bool reference = false;  ///< keep the tensor itself (with its autograd history) rather than a detached copy
  /// Keep only these packed tokens (rows of the tensor); all when absent.
  std::optional<std::vector<int64_t>> tokens;
};

/// Usage:
///   HookSession session(model.hooks());
///   session.capture({Site::kMlpDownIn, 5}).stop_after({Site::kMlpDownIn, 5}).attach();
///   model.forward(batch);
///   at::Tensor keys = session.captured({Site::kMlpDownIn, 5});
///   session.finish();
///
/// attach() resolves every site before it attaches any and detaches in reverse order however the scope ends.
/// A capture holds the latest pass that reached its site; it never moves to another device.
class HookSession {
 public:
  explicit HookSession(HookTable& table) : table_(&table) {}
  ~HookSession();
  HookSession(const HookSession&) = delete;
  HookSession& operator=(const HookSession&) = delete;

  /// The three of them throw Error(kInvalidArgument) after attach().
  HookSession& capture(SiteRef ref, CaptureOptions options = {});  ///< keeps the tensor at a site
  HookSession& edit(SiteRef ref, HookFn fn);                       ///< replaces it by what `fn` returns
  /// Ends the forward pass after this site.
  HookSession& stop_after(SiteRef ref);

  void attach();           ///< throws Error(kInvalidArgument) for a site that the model lacks
  void detach() noexcept;  ///< earlier than the end of the scope

  /// What lay there in the latest pass that reached the site. Throws Error(kInvalidArgument) if none did since
  /// attach(), or the site is not captured.
  [[nodiscard]] at::Tensor captured(const SiteRef& ref) const;
  /// Throws Error(kInvalidArgument) naming every hook that has not fired since attach(); then detaches.
  void finish();

 private:
  struct Entry;
  HookSession& add(Entry entry);
  HookTable* table_;
  std::vector<std::shared_ptr<Entry>> entries_;
  std::vector<HookHandle> handles_;
};

}  // namespace emend::hooks
