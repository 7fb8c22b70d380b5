// Connections of the HTTP library, with an end to patience: a client that sends its request drop by drop, or half of
// it, or nothing, has a thread for seconds and not for as long as it likes. Only http.cpp includes this.
#pragma once

#include <httplib.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <thread>

namespace emend::tools::serve {

/// A fixed number of threads. The connection that came last is served first: in a flood those that ask now are
/// answered, not those that have given up.
class Workers : public httplib::TaskQueue {
 public:
  /// Throws std::system_error where the system does not grant so many.
  Workers(int threads, std::atomic<int>& waiting) : waiting_(waiting) {
    try {
      for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
    } catch (...) {
      Workers::shutdown();
      throw;
    }
  }
  ~Workers() override { Workers::shutdown(); }
  void enqueue(std::function<void()> task) override {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
      waiting_ = static_cast<int>(tasks_.size()) - idle_;
    }
    wake_.notify_one();
  }
  void shutdown() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  void work() {
    for (std::unique_lock lock(mutex_);;) {
      ++idle_;
      wake_.wait(lock, [&] { return stop_ || !tasks_.empty(); });
      --idle_;
      if (tasks_.empty()) return;
      const auto task = std::move(tasks_.back());
      tasks_.pop_back();
      waiting_ = static_cast<int>(tasks_.size()) - idle_;
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::atomic<int>& waiting_;  ///< above 0: connections that no thread is free for
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
  int idle_ = 0;
  bool stop_ = false;
};

/// Bytes of a request's body; nothing where only its end would tell.
inline std::optional<size_t> body_length(const httplib::Request& request) {
  const auto given = request.get_header_value_count("Content-Length");
  if (request.has_header("Transfer-Encoding") || given > 1) return {};
  const std::string text = request.get_header_value("Content-Length"), &method = request.method;
  size_t length = 0;
  const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), length);
  if (given > 0) return fault == std::errc() && end == text.data() + text.size() ? std::optional(length) : std::nullopt;
  return method == "POST" || method == "PUT" || method == "PATCH" ? std::nullopt : std::optional(length);
}

/// A socket whose request has to be there in time: `seconds`, and one more for each 64 KiB that have come. More than
/// 64 KiB of headers or than the length that they give is not read.
class Connection : public httplib::Stream {
  using Clock = std::chrono::steady_clock;

 public:
  Connection(int socket, int write_seconds) : socket_(socket), write_seconds_(write_seconds) {}

  [[nodiscard]] bool next_request(double wait_seconds, double seconds) {
    if (begin_ == end_ && !ready(POLLIN, wait_seconds)) return false;
    until_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    got_ = 0;
    allowed_ = size_t{64} << 10;
    asked_ = false;
    return true;
  }
  /// After the headers.
  void expect_body(size_t length) {
    allowed_ = length;
    asked_ = true;
  }
  [[nodiscard]] bool whole() const { return asked_ && allowed_ == 0; }  ///< another request may follow
  /// To close with bytes unread would take the answer away from a client that still sends; at most 16 MiB are read.
  void let_read(double seconds) {
    ::shutdown(socket_, SHUT_WR);
    const auto over = Clock::now() + std::chrono::duration<double>(seconds);
    for (size_t left = size_t{4} << 10; left > 0 && Clock::now() < over; --left)
      if (!ready(POLLIN, std::chrono::duration<double>(over - Clock::now()).count()) ||
          ::recv(socket_, held_.data(), held_.size(), 0) <= 0)
        return;
  }
  bool is_readable() const override { return begin_ < end_ || ready(POLLIN, left()); }
  bool is_writable() const override {
    char byte;
    if (ready(POLLIN, 0) && ::recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) <= 0) return false;  // it has gone
    return ready(POLLOUT, write_seconds_);
  }
  ssize_t read(char* to, size_t size) override {
    if (allowed_ == 0) return 0;
    if (begin_ == end_) {
      if (!ready(POLLIN, left())) return -1;
      const ssize_t got = ::recv(socket_, held_.data(), held_.size(), 0);
      if (got <= 0) return got;
      begin_ = 0;
      end_ = static_cast<size_t>(got);
      got_ += end_;
    }
    const size_t count = std::min({size, end_ - begin_, allowed_});
    std::copy_n(held_.data() + begin_, count, to);
    begin_ += count;
    allowed_ -= count;
    return static_cast<ssize_t>(count);
  }
  ssize_t write(const char* from, size_t size) override {
    return ready(POLLOUT, write_seconds_) ? ::send(socket_, from, size, MSG_NOSIGNAL) : -1;  // also to half a one
  }
  void get_remote_ip_and_port(std::string&, int&) const override {}
  void get_local_ip_and_port(std::string&, int&) const override {}
  socket_t socket() const override { return socket_; }

 private:
  [[nodiscard]] double left() const {
    return std::chrono::duration<double>(until_ - Clock::now()).count() + static_cast<double>(got_) / 65536;
  }
  [[nodiscard]] bool ready(short events, double seconds) const {
    pollfd one{socket_, events, 0};
    return ::poll(&one, 1, static_cast<int>(1e3 * std::max(0.0, seconds))) > 0;
  }

  const int socket_, write_seconds_;
  std::array<char, 4096> held_{};
  size_t begin_ = 0, end_ = 0, got_ = 0, allowed_ = 0;
  bool asked_ = false;
  Clock::time_point until_;
};

/// The library's server over such connections.
class Listener : public httplib::Server {
 public:
  Listener(int threads, int seconds) : seconds_(seconds), workers_(std::make_unique<Workers>(threads, waiting_)) {
    new_task_queue = [this] { return workers_.release(); };
    set_write_timeout(seconds);
    set_keep_alive_timeout(kIdleSeconds);  // what the header says
    set_keep_alive_max_count(kRequests);
    set_socket_options([](int socket) {
      const int yes = 1;
      ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    });
  }
  /// After binding: the library lets five connections wait to be taken, and the sixth asks again after a second.
  void let_many_wait() { ::listen(svr_sock_, SOMAXCONN); }

 private:
  bool process_and_close_socket(socket_t socket) override {
    Connection link(socket, seconds_);
    bool good = false;
    for (int left = kRequests; left > 0 && svr_sock_ != INVALID_SOCKET; --left) {
      const bool crowded = waiting_ > 0;
      if (!link.next_request(crowded ? 0.5 : kIdleSeconds, crowded ? 1 : seconds_)) break;
      bool closed = false;
      good = process_request(link, left == 1, closed, [&](httplib::Request& request) {
        link.expect_body(body_length(request).value_or(SIZE_MAX));
        request.ranges.clear();                 // every answer is whole
        request.headers.erase("Content-Type");  // no forms: a body is JSON, whatever a client calls it
      });
      if (good && !link.whole()) link.let_read(crowded ? 0.1 : 1);
      if (!good || closed || !link.whole()) break;
    }
    ::shutdown(socket, SHUT_RDWR);
    ::close(socket);
    return good;
  }

  static constexpr int kIdleSeconds = 2, kRequests = 1000;  // of a connection
  const int seconds_;
  std::atomic<int> waiting_{0};
  std::unique_ptr<Workers> workers_;  ///< until the library takes them
};

}  // namespace emend::tools::serve
