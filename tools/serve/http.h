// A small HTTP server over routes that are data: who may ask, how much, and how an answer or a fault looks on the wire.
//
// Goals: everything that comes from the network is checked here, before any handler sees it. Only http.cpp knows the
// library that speaks HTTP, and connections.h how long its clients may take.
#pragma once

#include <functional>
#include <istream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace emend::tools::serve {

/// An answer other than 200, in OpenAI's form.
class HttpError : public std::runtime_error {
 public:
  HttpError(int status, const std::string& text, std::string code = {})
      : std::runtime_error(text), status_(status), code_(std::move(code)) {}
  [[nodiscard]] int status() const noexcept { return status_; }
  [[nodiscard]] nlohmann::ordered_json body() const;

 private:
  int status_;
  std::string code_;
};

// What a JSON document must be, in the part of JSON Schema that /openapi.json speaks: requests, and the server's own
// files.

struct SchemaFault {
  std::string where, got, expected;  ///< "prompts[2].targets"
};

/// {"type": "object", …} of the keywords in `text`. Known are type, enum, minimum, maximum, minItems, maxItems,
/// uniqueItems, items, properties, required, additionalProperties; where there are properties there are no others.
[[nodiscard]] nlohmann::json object_schema(const std::string& text);

/// The first fault of a value; fields that are null are taken away first, and 5.0 is 5. Integers fit 64 bits.
[[nodiscard]] std::optional<SchemaFault> schema_fault(nlohmann::json& value, const nlohmann::json& schema,
                                                      const std::string& where = "");

/// Throws HttpError 400.
[[noreturn]] void refuse(const std::string& text);

struct Request {
  std::string id;    ///< what stands for {id} or {name} in the route's path
  std::string body;  ///< as it came
  std::map<std::string, std::string> query = {};
  const nlohmann::json* schema = nullptr;  ///< of the body
  bool trusted = true;                     ///< came with the token, or none is asked for
  [[nodiscard]] nlohmann::json json()
      const;  ///< without nulls; throws HttpError 400 for anything that is not as `schema`
};

/// Takes bytes; false once the client has gone.
using Write = std::function<bool(std::string_view)>;

struct Reply {
  std::string body = {}, type = "application/json";
  int status = 200;
  std::map<std::string, std::string> headers = {};
  std::function<void(const Write&)> stream = {};  ///< server-sent events instead of a body
  std::shared_ptr<std::istream> file = {};        ///< instead of a body: read as it is sent
};
[[nodiscard]] Reply json_reply(const nlohmann::ordered_json& document, int status = 200);
/// "data: {…}\n\n"
[[nodiscard]] std::string event_line(const nlohmann::ordered_json& document);

struct Route {
  std::string method, path, summary;  ///< "GET", "/v1/packs/{name}"
  std::string request = {};           ///< JSON schema of the body, as object_schema takes it; empty: no body
  bool open = false;                  ///< also without the token
  std::function<Reply(const Request&)> handle = {};
};

struct HttpOptions {
  std::string host = "127.0.0.1", token;
  int port = 8080;  ///< 0: any
  size_t max_body = size_t{8} << 20;
  int threads = 256;
  int timeout_s = 5;  ///< for a client to send its request and to take a piece of the answer
};

[[nodiscard]] bool is_loopback(const std::string& host);

class HttpServer {
 public:
  /// Binds and starts its threads; who connects waits. Throws Error(kIo) if the address cannot be had,
  /// std::system_error for threads.
  explicit HttpServer(HttpOptions options);
  ~HttpServer();
  [[nodiscard]] int port() const noexcept;
  /// Answers until stop(). Throws Error(kIo) if the system ends it earlier.
  void serve(std::vector<Route> routes);
  [[nodiscard]] bool running() const noexcept;  ///< it answers; stop() ends nothing before
  void stop() noexcept;                         ///< from any thread
  /// "emend_http_requests_total{route="…",status="200"} 3" …
  [[nodiscard]] std::string metrics() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace emend::tools::serve
