@echo off
rem Puts toki at a stable place for this user and a `toki` command on PATH.
rem
rem   install.bat                 install, or upgrade what is there
rem   install.bat --offline DIR   take toki.py from DIR
rem   install.bat --yes           run `toki up --yes` at the end
rem   install.bat --uninstall     stop toki and remove the program; --purge: also state
rem
rem Needs a Python 3.9 or newer and nothing else.  Nothing is started and nothing is
rem downloaded unless you say yes.
setlocal EnableExtensions DisableDelayedExpansion
set "SHARE=%LOCALAPPDATA%\Programs\toki"
set "SOURCE=%~dp0"
set "ACT=install"
set "PURGE="
set "YES="
set "PY="

:options
if "%~1"=="" goto chosen
if /i "%~1"=="--offline" goto option_offline
if /i "%~1"=="--uninstall" goto option_uninstall
if /i "%~1"=="--purge" goto option_purge
if /i "%~1"=="--yes" goto option_yes
if /i "%~1"=="--help" goto usage
echo install.bat: unknown option %1 1>&2
goto usage_failed

:option_offline
if "%~2"=="" goto usage_failed
set "SOURCE=%~f2\"
shift
shift
goto options

:option_uninstall
set "ACT=uninstall"
shift
goto options

:option_purge
set "PURGE=1"
shift
goto options

:option_yes
set "YES=1"
shift
goto options

:usage
echo usage: install.bat [--offline DIR] [--yes]
echo        install.bat --uninstall [--purge]
exit /b 0

:usage_failed
echo   try: install.bat --help 1>&2
exit /b 2

:chosen
if not defined LOCALAPPDATA goto no_folder
call :find_python
if not defined PY goto no_python
echo python: %PY%
if "%ACT%"=="uninstall" goto uninstall

if not exist "%SOURCE%toki.py" goto no_source
"%PY%" -I "%SOURCE%toki.py" version >nul
if errorlevel 1 goto broken_source
if not exist "%SHARE%" mkdir "%SHARE%"
if exist "%SHARE%\toki.py" copy /y "%SHARE%\toki.py" "%SHARE%\toki.py.prev" >nul
copy /y "%SOURCE%toki.py" "%SHARE%\toki.py.new" >nul
if errorlevel 1 goto not_copied
move /y "%SHARE%\toki.py.new" "%SHARE%\toki.py" >nul
if errorlevel 1 goto not_copied
if /i "%TOKI_EXTRAS%"=="numpy" call :extras
> "%SHARE%\toki.cmd" echo @rem toki launcher, written by install.bat
>>"%SHARE%\toki.cmd" echo @if exist "%%~dp0extras" set "PYTHONPATH=%%~dp0extras"
>>"%SHARE%\toki.cmd" echo @"%PY%" -s -X utf8 "%%~dp0toki.py" %%*
>>"%SHARE%\toki.cmd" echo @exit /b %%ERRORLEVEL%%
echo program: %SHARE%\toki.py
echo command: %SHARE%\toki.cmd
call :on_path
call "%SHARE%\toki.cmd" version
if errorlevel 1 exit /b 1
if defined YES goto start
echo start it: toki up
exit /b 0

:start
call "%SHARE%\toki.cmd" up --yes
exit /b %ERRORLEVEL%

:uninstall
if not exist "%SHARE%\toki.py" goto remove
"%PY%" -I "%SHARE%\toki.py" service remove
"%PY%" -I "%SHARE%\toki.py" down
:remove
call :off_path
if exist "%SHARE%" rmdir /s /q "%SHARE%"
if defined PURGE goto purge
echo uninstalled; state and models are kept in %LOCALAPPDATA%\toki (--purge removes them)
exit /b 0

:purge
if defined TOKI_STATE_DIR echo TOKI_STATE_DIR is set: remove %TOKI_STATE_DIR% yourself
if exist "%LOCALAPPDATA%\toki" rmdir /s /q "%LOCALAPPDATA%\toki"
if exist "%APPDATA%\toki" rmdir /s /q "%APPDATA%\toki"
echo uninstalled, state and settings removed
exit /b 0

:extras
echo numpy goes to %SHARE%\extras (optional: toki never needs it)
"%PY%" -m pip install --upgrade --target "%SHARE%\extras" numpy
if errorlevel 1 echo numpy was not installed; everything else works without it
exit /b 0

rem The Store's alias prints a hint and fails, so every candidate has to prove itself.
:find_python
if defined TOKI_PYTHON call :try_python "%TOKI_PYTHON%"
if defined PY exit /b 0
for %%C in (py.exe python.exe python3.exe) do if not defined PY call :try_python %%C
exit /b 0

:try_python
set "ASK=import sys,ssl,sqlite3,zlib;print(getattr(sys,'_base_executable','') or sys.executable) if sys.version_info>=(3,9) else sys.exit(1)"
set "ANSWER=%TEMP%\toki-python-%RANDOM%.txt"
"%~1" -I -c "%ASK%" >"%ANSWER%" 2>nul
if not errorlevel 1 set /p PY=<"%ANSWER%"
if exist "%ANSWER%" del "%ANSWER%"
exit /b 0

rem The user's PATH only, through PowerShell: setx cuts it at 1024 characters.
:on_path
powershell -NoProfile -NonInteractive -Command "$d=$env:SHARE; $p=[string][Environment]::GetEnvironmentVariable('Path','User'); if (($p -split ';') -notcontains $d) { [Environment]::SetEnvironmentVariable('Path', ($p.TrimEnd(';') + ';' + $d).TrimStart(';'), 'User'); 'PATH: added for new windows' }"
if errorlevel 1 echo PATH: add %SHARE% to it in your account's environment variables
exit /b 0

:off_path
powershell -NoProfile -NonInteractive -Command "$d=$env:SHARE; $p=[string][Environment]::GetEnvironmentVariable('Path','User'); if ($p) { [Environment]::SetEnvironmentVariable('Path', ((($p -split ';') -ne $d) -join ';'), 'User') }"
exit /b 0

:no_python
echo install.bat: no Python 3.9 or newer with ssl, sqlite3 and zlib was found 1>&2
echo   try: install Python from python.org, or set TOKI_PYTHON=C:\path\python.exe 1>&2
exit /b 1

:no_source
echo install.bat: there is no toki.py in %SOURCE% 1>&2
echo   try: install.bat --offline DIR, the folder that holds toki.py 1>&2
exit /b 1

:broken_source
echo install.bat: %SOURCE%toki.py does not run; nothing was changed 1>&2
exit /b 1

:not_copied
echo install.bat: %SHARE%\toki.py cannot be written 1>&2
echo   try: toki down, then install.bat again 1>&2
exit /b 1

:no_folder
echo install.bat: LOCALAPPDATA is not set 1>&2
exit /b 1
