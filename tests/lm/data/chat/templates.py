"""Chat templates in the styles of well-known models, each with marks around what the assistant writes and without, and conversations."""

MARKS = "{% generation %}", "{% endgeneration %}"

LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{#- The system message is a message of its own, even where there is none. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You have these functions.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        BEGIN
        {%- if 'tool_calls' in message %}
            {%- if not message.tool_calls | length == 1 %}
                {{- raise_exception("one call at a time") }}
            {%- endif %}
            {%- set call = message.tool_calls[0].function %}
            {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + "}" }}
        {%- else %}
            {{- message['content'] | trim }}
        {%- endif %}
        {{- '<|eot_id|>' }}
        END
    {%- elif message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or (message.content is iterable and message.content is not string) %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- endif %}
    {{- "\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}
        BEGIN
        {%- if message.content %}
            {{- message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        END
        {{- '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

MISTRAL = """{%- set ns = namespace(system='', turns=0) %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- set ns.system = message['content'] + '\\n\\n' %}
        {%- continue %}
    {%- endif %}
    {%- if (message['role'] == 'user') != (ns.turns % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + ns.system + message['content'] | trim + ' [/INST]' }}
        {%- set ns.system = '' %}
    {%- elif message['role'] == 'assistant' %}
        BEGIN
        {{- ' ' + message['content'] | trim + eos_token }}
        END
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""

STYLES = {  # each with the tokens that begin and end a text
    "llama": (LLAMA, "<|begin_of_text|>", "<|eot_id|>"),
    "qwen": (QWEN, "<|endoftext|>", "<|im_end|>"),
    "mistral": (MISTRAL, "<s>", "</s>"),
}
SPECIAL = "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"
SPECIAL += "[INST]", "[/INST]"

TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Say <how> it's.", "parameters": {"type": "object", "properties": {"at": {}}}},
    }
]
CALLED = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"at": "Zürich"}}}]}

CONVERSATIONS = {  # with the tools of each, and what the assistant writes
    "short": ([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}], None, ["Hello."]),
    "long": (
        [
            {"role": "system", "content": "Be brief. 日本"},
            {"role": "user", "content": " What is 2 + 2?\n"},
            {"role": "assistant", "content": "4 🙂"},
            {"role": "user", "content": "And 3 + 3?"},
            {"role": "assistant", "content": "It is\n\n6"},
        ],
        None,
        ["4 🙂", "It is\n\n6"],
    ),
    "tools": (
        [
            {"role": "user", "content": "How is it in Zürich?"},
            CALLED,
            {"role": "tool", "content": '{"sky": "blue"}'},
            {"role": "assistant", "content": "Sunny."},
        ],
        TOOLS,
        [
            {
                "llama": '{"name": "weather", "parameters": {"at": "Zürich"}}',
                "qwen": '\n<tool_call>\n{"name": "weather", "arguments": {"at": "Zürich"}}\n</tool_call>',
            },
            "Sunny.",
        ],
    ),
}


def template(style: str, *, marked: bool) -> str:
    """Return the template of a style, with marks or without."""
    source = STYLES[style][0]
    begin, end = MARKS if marked else ("", "")
    return source.replace("BEGIN", begin.replace("{%", "{%-")).replace("END", end.replace("{%", "{%-"))
