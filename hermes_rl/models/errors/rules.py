"""Which reason an error body gives: one table, the first row that fits.

A row fits when the status is one of its own, and one of its codes stands in the body or its words
in the text. What no row knows goes by the status alone. The words are those of OpenAI, Anthropic,
OpenRouter, Google, Amazon, Azure, DeepSeek, Moonshot, Zhipu, Alibaba, Groq, xAI, Mistral, and of
vLLM, SGLang, llama.cpp, Ollama and TGI.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hermes_rl import errors as e
from hermes_rl.errors import Reason
from hermes_rl.models.errors.body import Fault

NO_STATUS = 0
"""Of an error inside an answer that began well."""

_LIMITS = (401, 402, 429)
_ANY = frozenset((NO_STATUS, *range(100, 600)))
_CONTENT = _ANY - frozenset(_LIMITS)
"""Where the text may speak of the request itself; a rate limit speaks of tokens too."""
_REFUSED = frozenset((NO_STATUS, 200, *range(400, 500))) - frozenset(_LIMITS)
_TROUBLE = frozenset((NO_STATUS, 200, *range(500, 600)))
_MONEY = frozenset((NO_STATUS, 200, 400, 401, 402, 403, 404, 429, 500, 503))
_RATE = frozenset((NO_STATUS, 200, 400, 403, 429, 500, 503))
_KEY = frozenset((NO_STATUS, 200, 400, 401, 403))


@dataclass(frozen=True)
class Rule:
    """One row of the table."""

    reason: Reason
    statuses: frozenset[int]
    codes: tuple[str, ...] = ()
    words: str = r"(?!)"
    kind: type[e.ModelError] | None = None
    """The class, where it is not that of the reason."""
    no_images: bool = False
    """The text says that the model takes no images."""
    upstream: bool = False
    """Only of what an aggregator quotes."""

    def fits(self, status: int, fault: Fault, text: str) -> bool:
        """Whether the row holds of an error; `text` is the fault's message."""
        if status not in self.statuses or (self.upstream and not fault.upstream):
            return False
        if any(code in fault.codes for code in self.codes):
            return True
        return re.search(self.words, text, re.IGNORECASE) is not None


KINDS: dict[Reason, type[e.ModelError]] = {
    "auth": e.AuthError,
    "auth_permanent": e.AuthError,
    "billing": e.BillingError,
    "rate_limit": e.RateLimited,
    "upstream_rate_limit": e.RateLimited,
    "overloaded": e.Overloaded,
    "server_error": e.ServerError,
    "timeout": e.ServerError,
    "ssl_cert_verification": e.AuthError,
    "context_overflow": e.ContextOverflow,
    "payload_too_large": e.PayloadTooLarge,
    "image_too_large": e.BadRequest,
    "model_not_found": e.ModelNotFound,
    "provider_policy_blocked": e.ModelNotFound,
    "content_policy_blocked": e.ContentFiltered,
    "format_error": e.BadRequest,
    "invalid_encrypted_content": e.BadRequest,
    "multimodal_tool_content_unsupported": e.BadRequest,
    "thinking_signature": e.BadRequest,
    "llama_cpp_grammar_pattern": e.BadRequest,
    "model_aborted": e.ModelAborted,
    "unknown": e.ServerError,
}
"""The class of each reason. Its cause is the reason's cause (DESIGN 5.6)."""

BY_STATUS: dict[int, Reason] = {
    301: "model_not_found", 302: "model_not_found", 303: "model_not_found", 307: "model_not_found",
    308: "model_not_found", 401: "auth", 402: "billing", 403: "auth", 404: "model_not_found",
    405: "model_not_found", 407: "auth", 408: "timeout", 409: "server_error",
    410: "model_not_found", 413: "payload_too_large", 425: "server_error", 429: "rate_limit",
    451: "auth_permanent", 499: "server_error", 503: "overloaded", 504: "timeout",
    522: "timeout", 524: "timeout", 529: "overloaded",
}  # fmt: skip
"""What a status means when the body does not say more. 503 is waited for like 529: nothing was
served. A redirect, or an address that takes no POST, is a wrong base_url: no unit could do
better."""

_REPLAY = (
    Rule(
        "invalid_encrypted_content", _CONTENT,
        ("invalid_encrypted_content",),
        r"encrypted[_ ]content.{0,200}(could not be (verified|decrypted)|invalid|malformed)"
        r"|encrypted[_ ]content is not supported|items are not persisted when .?store"
        r"|of type .?reasoning.? was provided without its required following item",
    ),
    Rule(
        "thinking_signature", _CONTENT,
        (),
        r"signature`?.{0,20}thinking|thinking.{0,120}(cannot be modified|must remain as)"
        r"|thinking.{0,60}(invalid|corrupted|missing) .{0,20}signature"
        r"|expected .?thinking.? or .?redacted_thinking.?, but found"
        r"|reasoning_details.{0,40}(unsupported|(not|n.t) (supported|permitted|allowed))"
        r"|thought[_ ]?signature is (not valid|invalid|corrupt)|corrupted thought signature",
    ),
    Rule(
        "llama_cpp_grammar_pattern", _CONTENT,
        (),
        r"pars(e|ing) grammar|json schema conversion failed|pattern must start with"
        r"|failed to initialize samplers|unable to generate parser for this template.{0,80}schema"
        r"|schema contains features not supported by|grammar (compil|is not support)"
        r"|'(pattern|format)' is not (permitted|supported)"
        r"|parameters\.properties.{0,80}format.{0,40}only 'enum' and 'date-time'",
    ),
)  # fmt: skip

_PARTS = (
    Rule(
        "format_error", _CONTENT,
        (),
        r"image_url is only supported by certain models|does(n't| not) support (image|vision)"
        r"|endpoints found that support image input|not a multimodal model"
        r"|image (input|content)s? (is|are) not (supported|enabled|allowed)"
        r"|unknown variant `image_url`|at most 0 images?|images? (is|are) not supported"
        r"|multimodal .{0,30}not supported|不支持.{0,6}(图片|图像|多模态)",
        no_images=True,
    ),
    Rule(
        "image_too_large", _CONTENT,
        ("image_too_large", "image_file_too_large"),
        r"image.{0,120}(exceeds? .{0,40}(max|limit|size|\d)|too large|larger than|is too big)"
        r"|image dimensions|(too many|at most \d+) images?|图片.{0,10}(过大|超过|太大)",
    ),
    Rule(
        "multimodal_tool_content_unsupported", _CONTENT,
        (),
        r"tool.{0,80}content.{0,60}(must|should|expected|only).{0,20}(string|text)"
        r"|content.{0,20} (must|should) be a(n? non-empty)? string|`?text`? is not set"
        r"|invalid type: sequence, expected a string|^input should be a valid string"
        r"|(tool|messages?\b.{0,20}content).{0,60}input should be a valid string"
        r"|multimodal .{0,20}tool (result|content|message)",
    ),
)  # fmt: skip

_ACCOUNT = (
    Rule(
        "provider_policy_blocked", _REFUSED,
        (),
        r"(matching|available).{0,40}(data|guardrail|privacy).{0,30}(policy|restriction|setting)"
        r"|no allowed providers|all providers have been ignored|settings/privacy",
    ),
    Rule(
        "payload_too_large", frozenset((NO_STATUS, 200, 400, 413, 429)),
        (),
        r"request too large for .{0,160}(tokens per|tpm|rpm)",
        kind=e.BadRequest,  # the account's rate, not the model's window: no mark for the model
    ),
    # Google says «check your plan and billing» of each minute's limit too.
    Rule("rate_limit", frozenset((NO_STATUS, 200, 429)), ("resource_exhausted",)),
    Rule(
        "rate_limit", frozenset((402,)),
        ("usage_limit_reached",),
        r"(usage|rate|request|spend) limit.{0,80}(try again|reset|retry|temporar)|temporarily",
    ),
    Rule(
        "billing", _MONEY,
        (
            "insufficient_quota", "exceeded_current_quota_error", "billing_hard_limit_reached",
            "billing_not_active", "insufficient_balance", "insufficient_credits",
            "insufficient_funds", "payment_required", "payment_required_error", "billing_error",
            "creditserror", "quota_exceeded", "account_deactivated_for_billing", "arrearage",
            "1113", "insufficient_user_quota", "accountoverdueerror", "accountoverdue",
            "usage_not_included", "allocationquota.freetieronly", "spend_limit_reached",
        ),
        r"insufficient[_ ](account )?(credits?|balance|quota|funds)|balance (is|was) (insufficient"
        r"|too low|not enough)|exceeded your current quota|exceeded current quota"
        r"|credit balance is too low|requires more credits|billing (hard )?limit|out of credits"
        r"|(no remaining|not enough) credits|top up|recharge|free tier .{0,40}exhausted"
        r"|account is not active|account.{0,20}(in arrears|overdue)|key limit exceeded"
        r"|reached your specified (workspace )?api usage limits"
        r"|余额不足|欠费|额度不足|请充值|余额.{0,6}不够",
    ),
    Rule(
        "auth_permanent", _KEY,
        ("account_deactivated", "organization_disabled", "unsupported_country_region_territory"),
        r"(organi[sz]ation|account|api key|project|user) (associated .{0,40})?(has been|have been"
        r"|was|is) (disabled|deactivated|suspended|terminated|revoked|banned|blocked)"
        r"|country, region,? or territory not supported|country not supported"
        r"|location is not supported|账号.{0,6}(封禁|停用|冻结)",
    ),
)  # fmt: skip

_PACE = (
    Rule(
        "overloaded", frozenset((429,)),
        (
            "overloaded_error", "overloaded", "engine_overloaded", "engine_overloaded_error",
            "server_overloaded", "1305", "modelnotreadyexception", "server_is_overloaded",
            "slow_down",
        ),
        r"(engine|model|server)s? (is|are) (currently |temporarily )?overloaded|访问量过大"
        r"|experiencing high (demand|load|traffic)",
    ),
    Rule(
        "upstream_rate_limit", frozenset((NO_STATUS, 200, 429)),
        (),
        r"rate[- ]limit|too many requests|429|1015|returned error|quota|throttl",
        upstream=True,
    ),
    Rule(
        "upstream_rate_limit", frozenset((NO_STATUS, 200, 429, 502, 503)),
        ("upstream_rate_limit", "upstream_rate_limited"),
        r"rate[- ]limited upstream|upstream.{0,60}(rate[- ]limit|too many requests|\b429\b)"
        r"|provider rate limit exceeded",
    ),
    Rule(
        "rate_limit", _RATE,
        (
            "throttlingexception", "rate_limit_error", "rate_limit_exceeded", "too_many_requests",
            "rate_limit_reached_error", "throttling", "throttling.ratequota", "limit_requests",
            "throttling.allocationquota", "throttling.burstrate", "limit_burst_rate", "1302",
            "1303", "1304", "servicequotaexceededexception", "ratelimitreached", "429",
            "rate_limit_usage_exceeded", "requestthrottled", "toomanyrequestsexception",
        ),
        r"rate[- ]?limit.{0,40}(reached|exceed|hit)|being rate[- ]limited|too many requests|throttl"
        r"|(requests|tokens) per (min|sec|day|hour)|请求过于频繁|速率限制|并发数过高|请求频率|限流",
    ),
    Rule(
        "overloaded", _TROUBLE,
        (
            "overloaded_error", "overloaded", "engine_overloaded", "engine_overloaded_error",
            "server_overloaded", "unavailable", "modelnotreadyexception",
            "serviceunavailableexception", "service_unavailable", "1305", "server_is_overloaded",
            "slow_down", "503", "529",
        ),
        r"overload|over capacity|at capacity|queue is full|server busy|(is|are) (temporarily )?busy"
        r"|no (healthy|available) (upstream|server|worker|instance)|temporarily unavailable"
        r"|loading model|系统繁忙|服务.{0,4}繁忙|访问量过大",
    ),
    Rule(
        "auth", frozenset((NO_STATUS, 200, 400, 403)),
        (
            "invalid_api_key", "authentication_error", "invalid_authentication_error",
            "unauthenticated", "api_key_invalid", "expiredtokenexception", "invalidapikey",
            "unrecognizedclientexception", "invalidsignatureexception", "incorrect_api_key_error",
            "invalid_auth", "unauthorized", "missingauthenticationtokenexception",
        ),
        r"(incorrect|invalid|missing|no|wrong|expired|malformed) (api[ _-]?key|(auth(entication)?"
        r"|access|bearer|oauth|security) (token|key|credentials?)|credentials)\b"
        r"|api[ _]key (not valid|expired|is invalid|not found)"
        r"|authentication (fails|failed|required)|unauthori[sz]ed"
        r"|(auth|access|oauth|security) token .{0,40}(expired|invalid)"
        r"|密钥.{0,6}(无效|错误)|令牌.{0,6}(无效|过期)|身份验证",
    ),
)  # fmt: skip

_REQUEST = (
    Rule(
        "format_error", _CONTENT,
        ("unsupported_parameter", "unsupported_value", "unknown_parameter"),
        r"unsupported (parameter|value|argument)|unrecognized request argument|unknown parameter"
        r"|parameter.{0,60}(is|are) not supported|extra inputs are not permitted",
    ),
    Rule(
        "format_error", _CONTENT,
        (),
        r"max_(completion_|output_|new_)?tokens.{0,120}(too large|at most|above maximum"
        r"|maximum allowed number|less than or equal|valid range|cannot exceed)"
        r"|range of max_(completion_|output_)?tokens|supports at most .{0,20}completion tokens"
        r"|maxoutputtokens value of|maximum tokens you requested exceed",
    ),
    Rule(
        "context_overflow", _CONTENT,
        (
            "context_length_exceeded", "exceed_context_size_error", "string_above_max_length",
            "model_max_prompt_tokens_exceeded", "context_window_exceeded", "1261",
            "request_too_long", "contextwindowexceedederror", "model_context_window_exceeded",
        ),
        r"maximum context length|context[_ ](length|window|size) .{0,40}(exceed|overflow|is full)"
        r"|context window|max_model_len|contextwindowexceeded|context the overflows"
        r"|exceed(s|ed|ing)? (the |its |your |this )?(available |maximum |model'?s? |allowed )*"
        r"(context|token limit|allowed length|input length|prompt length|max length)"
        r"|longer than the (model's )?(maximum )?(model |context )|max(imum)? length exceeded"
        r"|(prompt|input|request|inputs|messages?) (is|are) too long|prompt .{0,12}超长"
        r"|input length .{0,60}exceed|input token count.{0,60}exceed|too many (input )?tokens"
        r"|token count.{0,40}exceeds|total number of tokens.{0,60}exceed|must be at least 1, got -"
        r"|maximum (model|prompt|input) length|exceed_context_size|range of input length"
        r"|maximum number of (input )?tokens allowed|tokens? .{0,20}too large for model"
        r"|`?inputs`? tokens \+|expected maxlength: \d+|context limit|string too long"
        r"|reduce the length of the (messages|input|prompt)|tokens exceed(s|ed)? .{0,40}limit"
        r"|(上下文|输入|提示词|请求).{0,10}(过长|超长|超过.{0,8}(长度|限制)|超出)|超(过|出).{0,10}最大.{0,4}长度",
    ),
    Rule(
        "content_policy_blocked", _CONTENT,
        (
            "content_filter", "content_policy_violation", "responsibleaipolicyviolation",
            "data_inspection_failed", "datainspectionfailed", "invalid_prompt", "cyber_policy",
            "image_content_policy_violation", "prohibited_content", "1301", "1026", "1027",
            "content_filter_error", "sensitivecontentdetected", "moderation_blocked", "misuse",
        ),
        r"content (management )?policy|content[_ ]filter|flagged (by|for|as)|safety system"
        r"|usage polic(y|ies)|content exists risk|considered high risk|inappropriate content"
        r"|violat\w+ .{0,40}(polic|guideline|terms)|prompt was blocked|blocked by .{0,30}(safety"
        r"|polic|filter)|input was flagged|敏感|内容安全|不安全|违规|不合规",
    ),
    Rule(
        "model_not_found", _REFUSED,
        (
            "model_not_found", "model_not_supported", "not_found_error", "invalid_model",
            "deploymentnotfound", "model_decommissioned", "1211", "resourcenotfoundexception",
            "invalidendpointormodel.notfound", "modelnotfound", "unknown_model", "model_not_exist",
        ),
        r"model\b.{0,120}(does not exist|not found|not exist|is not supported|not available|not"
        r" accessible|decommissioned|has been (retired|deprecated|shut down)|no longer available)"
        r"|no such model|unknown model|not a valid model|model identifier is invalid"
        r"|access to the model|endpoints found for|endpoints found that support tool"
        r"|http request (was sent )?to (an )?https"
        r"|does not support (tools|function calling|tool)|模型.{0,20}不存在|不存在.{0,10}模型",
    ),
    Rule(
        "timeout", _TROUBLE | {400},
        ("timeout_error", "request_timeout", "deadline_exceeded", "modeltimeoutexception",
         "gateway_timeout", "timeout", "vector_store_timeout"),
        r"timed?[- ]?out|deadline exceeded|请求超时",
    ),
    Rule(
        "model_aborted", _TROUBLE,
        ("request_aborted", "abort", "aborted_by_engine"),
        r"request .{0,30}(was|has been|is)? ?aborted|aborted by (the )?(engine|scheduler|server)",
    ),
    Rule(
        "server_error", frozenset((NO_STATUS, 200)),
        ("server_error", "api_error", "internal_error", "internal_server_error", "internal",
         "internalserverexception", "upstream_error", "internalerror", "modelerrorexception",
         "modelstreamerrorexception", "500", "502"),
        r"internal (server )?error|upstream request failed|server had an error",
    ),
    Rule(
        "format_error", frozenset((NO_STATUS, 200)),
        ("invalid_request_error", "invalid_argument", "validationexception", "bad_request",
         "badrequesterror", "failed_precondition", "invalid_image", "invalid_image_format",
         "invalid_base64_image", "invalid_image_url", "image_parse_error", "image_too_small",
         "unsupported_image_media_type", "empty_image_file", "failed_to_download_image",
         "image_file_not_found"),
    ),
)  # fmt: skip

RULES: tuple[Rule, ...] = (*_REPLAY, *_PARTS, *_ACCOUNT, *_PACE, *_REQUEST)


def rule_of(status: int, fault: Fault) -> Rule | None:
    """The first row that fits; None when only the status speaks."""
    text = fault.message
    return next((rule for rule in RULES if rule.fits(status, fault, text)), None)


def reason_by_status(status: int) -> Reason:
    """What a status means alone."""
    if status in BY_STATUS:
        return BY_STATUS[status]
    if status == NO_STATUS:
        return "unknown"
    return "server_error" if status >= 500 else "format_error"
