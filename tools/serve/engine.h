// The one thread that owns the model: it continues all texts together, whichever edit packs each of them wants.
//
// The weights stay those of the model. A row whose packs change matrices of MLPs, as editors do, has the products with
// these matrices replaced by those with the edited ones, made once by applying the packs exactly as
// `emend generate --pack` does; everything else of a pass is shared by all rows. Packs that change more (other weights,
// parts beside the weights) are put into the model while their rows run, alone.
//
// Goals: every answer comes from exactly one set of packs, and no set waits for another longer than it must.
#pragma once

#include <emend/core/cancel.h>
#include <emend/hooks/hook_point.h>
#include <emend/models/generation.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "answer.h"
#include "pack_folder.h"

namespace emend::tools::serve {

struct EngineOptions {
  int64_t rows = 16;                       ///< continued together
  int64_t queue = 64;                      ///< that wait; more are refused
  int64_t cache_bytes = int64_t{1} << 30;  ///< of keys and values
};

struct EngineFigures {
  int64_t waiting = 0, running = 0, cache_bytes = 0, tokens = 0, sets = 0;
};

/// A text to continue.
struct Task {
  std::vector<int64_t> prompt;
  models::GenerateOptions sampling;
  PackSet packs;
  int64_t row = 0;  ///< of the answers to one request: decides the random stream
  std::shared_ptr<Answer> answer;
  int64_t group = -1;  ///< the engine's
};

/// The error in hand, without the places in LibTorch that it passed.
[[nodiscard]] std::exception_ptr told();

class Engine {
 public:
  Engine(models::Model& model, EngineOptions options);
  ~Engine();
  void stop();  ///< answers that are not finished fail, and no more are taken

  /// All of them or none: throws HttpError 429 if the queue is full, 400 for a text that never fits.
  void submit(std::vector<Task> tasks);
  /// Runs `work` between two steps, with exactly these packs in the model's weights, and waits for it. Throws what it
  /// throws.
  void with(const PackSet& packs, const std::function<void(models::Model&, const editors::RuntimeScope&)>& work);
  [[nodiscard]] EngineFigures figures() const;
  [[nodiscard]] const models::Model& model() const noexcept { return model_; }
  /// Of a prompt and its answer together.
  [[nodiscard]] int64_t most_tokens() const;
  /// Texts of so many tokens each that may be continued at once.
  [[nodiscard]] int64_t rows_of(int64_t tokens) const;
  /// Requested by stop().
  [[nodiscard]] const CancelToken& stopping() const noexcept { return stopping_; }

 private:
  struct Place;
  struct Edited;
  struct Exclusive;
  using Shared = std::shared_ptr<const Edited>;

  void loop();
  std::vector<Task> admit();
  void begin(std::vector<Task> tasks);
  void advance(std::vector<Task> joined);
  void fail_all(const std::exception_ptr& error);
  [[nodiscard]] bool beside(const PackSet& packs) const;
  [[nodiscard]] Shared edited(const PackSet& packs);
  [[nodiscard]] Shared make_edited(const PackSet& packs);
  void attach(const models::TokenBatch& batch, const std::vector<int64_t>& groups);
  void run(Exclusive& exclusive);

  models::Model& model_;
  const EngineOptions options_;
  const bool hooked_;  ///< by what the model's own folder holds beside the weights
  CancelToken stopping_;
  std::vector<Place> places_;
  int64_t token_bytes_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Task> waiting_;
  std::deque<Exclusive*> exclusive_;
  bool stop_ = false;
  EngineFigures figures_;

  // Of the thread alone.
  std::unique_ptr<models::RunningBatch> batch_;
  std::vector<Task> running_;
  std::list<Shared> sets_;             ///< latest first
  std::vector<Shared> groups_;         ///< of the running rows, by Task::group; null: free
  std::unique_ptr<InForce> in_force_;  ///< packs that are in the model itself
  std::vector<hooks::HookHandle> handles_;
  std::thread thread_;
};

}  // namespace emend::tools::serve
