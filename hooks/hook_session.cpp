#include <ATen/ATen.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/hooks/hook_session.h>

#include <array>

namespace emend::hooks {

struct HookSession::Entry {
  enum class Kind { kCapture, kEdit, kStop };
  Kind kind;
  SiteRef ref;
  CaptureOptions options = {};
  HookFn fn = {};
  bool fired = false;
  at::Tensor value = {};
};

// Rows of a packed tensor, copied unless a reference was asked for.
static at::Tensor take(const at::Tensor& x, const CaptureOptions& options, const SiteRef& ref) {
  at::Tensor kept = options.reference ? x : x.detach();
  if (!options.tokens) return options.reference ? kept : kept.clone();
  for (const int64_t token : *options.tokens)
    if (token < 0 || token >= x.size(0))
      refuse({"capture at " + to_string(ref), "token " + std::to_string(token),
              "a packed token from 0 to " + std::to_string(x.size(0) - 1), "index tokens with TokenBatch::token"});
  const at::Tensor rows = devices::index_on(*options.tokens, kept);
  return kept.index_select(0, rows);
}

HookSession::~HookSession() {
  detach();
}

HookSession& HookSession::add(Entry entry) {
  if (!handles_.empty())
    refuse({"hook session", to_string(entry.ref) + " was added to an attached session", "sites before attach()",
            "detach() first, or make another session"});
  entries_.push_back(std::make_shared<Entry>(std::move(entry)));
  return *this;
}

HookSession& HookSession::capture(SiteRef ref, CaptureOptions options) {
  return add({Entry::Kind::kCapture, ref, std::move(options)});
}

HookSession& HookSession::edit(SiteRef ref, HookFn fn) {
  return add({Entry::Kind::kEdit, ref, {}, std::move(fn)});
}

HookSession& HookSession::stop_after(SiteRef ref) {
  return add({Entry::Kind::kStop, ref});
}

void HookSession::attach() {
  if (!handles_.empty()) refuse({"hook session", "attach() was called twice", "one call", "detach() first"});
  std::vector<HookPoint*> points;
  for (const auto& entry : entries_) points.push_back(&table_->at(entry->ref));
  // Stops go last at their site, so that captures and edits there have run.
  for (const bool stops : {false, true}) {
    for (size_t i = 0; i < entries_.size(); ++i) {
      const auto entry = entries_[i];
      if ((entry->kind == Entry::Kind::kStop) != stops) continue;
      entry->fired = false;
      entry->value = at::Tensor();
      handles_.push_back(points[i]->add([entry](const at::Tensor& x) -> at::Tensor {
        entry->fired = true;
        if (entry->kind == Entry::Kind::kStop) throw StopForward{};
        if (entry->kind == Entry::Kind::kEdit) return entry->fn(x);
        entry->value = take(x, entry->options, entry->ref);
        return {};
      }));
    }
  }
}

void HookSession::detach() noexcept {
  while (!handles_.empty()) handles_.pop_back();
}

at::Tensor HookSession::captured(const SiteRef& ref) const {
  bool declared = false;
  for (const auto& entry : entries_) {
    if (entry->kind != Entry::Kind::kCapture || entry->ref != ref) continue;
    declared = true;
    if (entry->fired) return entry->value;
  }
  refuse({"hook session",
          "reading " + to_string(ref) + ", which " +
              (declared ? "did not fire in the forward pass" : "this session does not capture"),
          "a captured site",
          declared ? "the pass may have stopped or started elsewhere, or the family has no such place"
                   : "add capture() before attach()"});
}

void HookSession::finish() {
  static constexpr std::array<const char*, 3> kVerbs = {"capture at ", "edit at ", "stop at "};
  std::string missed;
  for (const auto& entry : entries_)
    if (!entry->fired) append_item(missed, kVerbs[static_cast<size_t>(entry->kind)] + to_string(entry->ref));
  detach();
  if (!missed.empty())
    refuse({"hook session", "these hooks did not fire: " + missed, "every hook to fire at least once",
            "run a forward pass that reaches these sites"});
}

}  // namespace emend::hooks
