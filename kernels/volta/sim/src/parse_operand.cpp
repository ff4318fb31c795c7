#include <cmath>
#include <cstdlib>
#include <unordered_map>

#include "failure.h"
#include "half.h"
#include "parse.h"

namespace volta_sim {
namespace {

bool starts_with(const std::string& text, const char* beginning) { return text.rfind(beginning, 0) == 0; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Removes everything from the first `mark` on and returns it.
std::string cut(std::string& text, char mark) {
  const size_t at = text.find(mark);
  if (at == std::string::npos) return "";
  const std::string rest = text.substr(at);
  text.erase(at);
  return rest;
}

uint32_t parse_hex(const std::string& text) {
  const bool negative = starts_with(text, "-");
  const std::string digits = text.substr(negative ? 1 : 0);
  char* end = nullptr;
  const auto value = static_cast<uint32_t>(std::strtoull(digits.c_str(), &end, 16));
  if (!starts_with(digits, "0x") || *end != '\0') fail("%s is not a hexadecimal number.", text.c_str());
  return negative ? 0 - value : value;
}

double parse_decimal(const std::string& text) {
  if (text.find("INF") != std::string::npos) return text[0] == '-' ? -INFINITY : INFINITY;
  if (text.find("NAN") != std::string::npos) return NAN;
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (*end != '\0') fail("%s is not a number.", text.c_str());
  return value;
}

uint32_t parse_number(const std::string& text, NumberFormat format) {
  if (text.find("0x") != std::string::npos) return parse_hex(text);
  const double value = parse_decimal(text);
  if (format == NumberFormat::kFloat) return as_bits(static_cast<float>(value));
  if (format == NumberFormat::kHalf) return double_to_half(value);
  return static_cast<uint32_t>(static_cast<int64_t>(value));
}

// The number after one or two letters: R12, P3, SB0. RZ and PT have names instead of numbers.
int parse_index(const std::string& text, size_t letters, int most) {
  char* end = nullptr;
  const long index = std::strtol(text.c_str() + letters, &end, 10);
  if (text.size() == letters || !is_digit(text[letters]) || *end != '\0' || index > most) {
    fail("operand %s is not known.", text.c_str());
  }
  return static_cast<int>(index);
}

int parse_register(const std::string& text) { return text == "RZ" ? kZeroRegister : parse_index(text, 1, 254); }

// Parses the content of square brackets: "R2.X4+0x10", "R2+-0x8" or "0x160".
void parse_sum(std::string text, Operand& operand) {
  while (!text.empty()) {
    std::string rest = cut(text, '+');
    if (starts_with(text, "R")) {
      const std::string suffix = cut(text, '.');
      operand.index = parse_register(text);
      if (suffix == ".X4" || suffix == ".X8" || suffix == ".X16") {
        operand.scale = static_cast<uint32_t>(std::strtoul(suffix.c_str() + 2, nullptr, 10));
      } else if (!suffix.empty() && suffix != ".64") {
        fail("%s in an address is not known.", suffix.c_str());
      }
    } else {
      operand.immediate += parse_hex(text);
    }
    text = rest.empty() ? rest : rest.substr(1);
  }
}

std::string between(const std::string& text, char open, char close, size_t from) {
  const size_t begin = text.find(open, from), end = text.find(close, from);
  if (begin == std::string::npos || end == std::string::npos || end < begin) fail("%s has no end.", text.c_str());
  return text.substr(begin + 1, end - begin - 1);
}

void apply_suffixes(std::string suffixes, Operand& operand) {
  while (!suffixes.empty()) {
    std::string rest = suffixes.substr(1);
    const std::string word = rest.substr(0, rest.find('.'));
    suffixes = rest.substr(word.size());
    if (word == "H0_H0") {
      operand.half = HalfSelect::kLow;
    } else if (word == "H1_H1") {
      operand.half = HalfSelect::kHigh;
    } else if (word == "F32") {
      operand.half = HalfSelect::kFromFloat;
    } else if (word == "ROW") {
      operand.row_major = true;
    } else if (word != "reuse" && word != "COL") {
      fail("%s at an operand is not known.", word.c_str());
    }
  }
}

SpecialRegister parse_special(const std::string& text) {
  static const auto* names = new std::unordered_map<std::string, SpecialRegister>{
      {"SR_TID.X", SpecialRegister::kTidX},    {"SR_TID.Y", SpecialRegister::kTidY},
      {"SR_TID.Z", SpecialRegister::kTidZ},    {"SR_CTAID.X", SpecialRegister::kCtaX},
      {"SR_CTAID.Y", SpecialRegister::kCtaY},  {"SR_CTAID.Z", SpecialRegister::kCtaZ},
      {"SR_LANEID", SpecialRegister::kLane},   {"SR_EQMASK", SpecialRegister::kEqMask},
      {"SR_LTMASK", SpecialRegister::kLtMask}, {"SR_LEMASK", SpecialRegister::kLeMask},
      {"SR_GTMASK", SpecialRegister::kGtMask}, {"SR_GEMASK", SpecialRegister::kGeMask},
      {"SRZ", SpecialRegister::kZero},
  };
  const auto found = names->find(text);
  if (found == names->end()) fail("%s is not modelled.", text.c_str());
  return found->second;
}

bool is_number(const std::string& text) {
  const size_t sign = text[0] == '-' || text[0] == '+' ? 1 : 0;
  return text.size() > sign && (is_digit(text[sign]) || text[sign] == '.' || starts_with(text.substr(sign), "INF") ||
                                starts_with(text.substr(sign), "QNAN") || starts_with(text.substr(sign), "SNAN"));
}

std::string without_bars(const std::string& text) {
  std::string kept;
  for (const char c : text) {
    if (c != '|') kept += c;
  }
  return kept;
}

void parse_named(std::string text, Operand& operand) {
  if (starts_with(text, "SR")) {
    operand.kind = OperandKind::kSpecialRegister;
    operand.special = parse_special(text);
    return;
  }
  apply_suffixes(cut(text, '.'), operand);
  if (text == "PR") {
    operand.kind = OperandKind::kAllPredicates;
  } else if (starts_with(text, "SB")) {
    operand.kind = OperandKind::kScoreboard;
    operand.index = parse_index(text, 2, kNumScoreboards - 1);
  } else if (starts_with(text, "R")) {
    operand.kind = OperandKind::kRegister;
    operand.index = parse_register(text);
  } else if (starts_with(text, "P")) {
    operand.kind = OperandKind::kPredicate;
    operand.index = text == "PT" ? kTruePredicate : parse_index(text, 1, kTruePredicate - 1);
  } else if (starts_with(text, "B")) {
    operand.kind = OperandKind::kConvergence;
    operand.index = parse_index(text, 1, 15);
  } else {
    fail("operand %s is not known.", text.c_str());
  }
}

}  // namespace

Operand parse_operand(const std::string& written, NumberFormat format) {
  Operand operand;
  std::string text = without_bars(written);
  operand.absolute = text.size() != written.size();
  while (!text.empty() && !is_number(text) && (text[0] == '-' || text[0] == '!' || text[0] == '~')) {
    (text[0] == '-' ? operand.negate : operand.invert) = true;
    text.erase(0, 1);
  }
  if (text.empty()) fail("operand %s is not known.", written.c_str());
  if (is_number(text)) {
    operand.kind = OperandKind::kImmediate;
    operand.immediate = parse_number(text, format);
  } else if (starts_with(text, "c[")) {
    operand.kind = OperandKind::kConstant;
    operand.bank = static_cast<int>(parse_hex(between(text, '[', ']', 0)));
    const size_t second = text.find("][") + 1, end = text.find(']', second);
    parse_sum(between(text, '[', ']', second), operand);
    apply_suffixes(text.substr(end + 1), operand);
  } else if (text[0] == '[') {
    operand.kind = OperandKind::kAddress;
    parse_sum(between(text, '[', ']', 0), operand);
  } else {
    parse_named(text, operand);
  }
  return operand;
}

}  // namespace volta_sim
